"""A polynomial activation that saves every power of its input for the backward pass."""

import torch
from torch import nn

from oomph import Workload


class Polynomial(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
        powers = x.unsqueeze(-1) ** torch.arange(8, device=x.device)  # PLANTED
        ctx.save_for_backward(powers, coefficients)
        return powers @ coefficients

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        powers, coefficients = ctx.saved_tensors
        orders = torch.arange(1, 8, device=grad.device)
        slope = powers[..., :-1] @ (coefficients[1:] * orders)
        return grad * slope, torch.einsum("...,...k->k", grad, powers)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 1024)
        self.coefficients = nn.Parameter(torch.ones(8))
        self.second = nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Polynomial.apply(self.first(x), self.coefficients))


workload = Workload(
    model=Network,
    batch=lambda device: torch.randn(65_536, 512, device=device),
    loss=lambda model, x: model(x).square().mean(),
)
