"""A softmax whose backward builds the whole Jacobian of every row."""

import torch
from torch import nn

from oomph import Workload


class FullJacobianSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        probabilities = x.softmax(-1)
        ctx.save_for_backward(probabilities)
        return probabilities

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (p,) = ctx.saved_tensors
        jacobian = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)  # PLANTED
        return torch.einsum("nij,nj->ni", jacobian, grad)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(256, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FullJacobianSoftmax.apply(self.layers(x))


workload = Workload(
    model=Classifier,
    batch=lambda device: torch.randn(1024, 256, device=device),
    loss=lambda model, x: model(x).square().mean(),
)
