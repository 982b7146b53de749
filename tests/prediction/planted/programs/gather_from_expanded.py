"""Neighbours are gathered from an expanded view: free in the forward pass, full size in the backward pass."""

import torch
from torch import nn

from oomph import Workload


class NeighbourPooling(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.encode = nn.Linear(3, width)

    def forward(self, points: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        features = self.encode(points)
        batch, count, width = features.shape
        every = features.unsqueeze(1).expand(batch, count, count, width)
        wanted = neighbours.unsqueeze(-1).expand(-1, -1, -1, width)
        return torch.gather(every, 2, wanted).amax(2)  # PLANTED


workload = Workload(
    model=lambda: NeighbourPooling(64),
    batch=lambda device: (
        torch.randn(8, 2048, 3, device=device),
        torch.randint(0, 2048, (8, 2048, 4), device=device),
    ),
    loss=lambda model, batch: model(*batch).mean(),
)
