"""A hypernetwork: every sample gets its own full weight matrix, made from two thin factors."""

import torch
from torch import nn

from oomph import Workload


class LowRankPerSample(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.width, self.rank = width, rank
        self.scale = nn.Parameter(torch.ones(()))
        self.to_left = nn.Linear(64, width * rank)
        self.to_right = nn.Linear(64, rank * width)

    def forward(self, x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
        left = self.to_left(code).view(-1, self.width, self.rank)
        right = self.to_right(code).view(-1, self.rank, self.width)
        delta = self.scale * torch.einsum("bor,bri->boi", left, right)  # PLANTED
        return torch.bmm(x, delta)


workload = Workload(
    model=lambda: LowRankPerSample(2048, 4),
    batch=lambda device: (torch.randn(256, 16, 2048, device=device), torch.randn(256, 64, device=device)),
    loss=lambda model, batch: model(*batch).square().mean(),
)
