"""Every expert is applied to every token by one broadcasted product."""

import torch
from torch import nn

from oomph import Workload


class DenseExperts(nn.Module):
    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        per_expert = torch.matmul(x.unsqueeze(1), self.up)  # PLANTED
        chosen = torch.einsum("betf,bte->btf", per_expert, weights)
        return self.down(chosen)


workload = Workload(
    model=lambda: DenseExperts(experts=16, width=512, inner=1024),
    batch=lambda device: torch.randn(64, 512, 512, device=device),
    loss=lambda model, x: model(x).square().mean(),
)
