"""The stem keeps the full resolution: no stride, many channels."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 128, 3, padding=1)
        self.norm = nn.BatchNorm2d(128)
        self.reduce = nn.Conv2d(128, 64, 8, stride=8)
        self.head = nn.Linear(64, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        full = F.silu(self.norm(self.stem(images)))  # PLANTED
        return self.head(self.reduce(full).mean((2, 3)))


workload = Workload(
    model=Backbone,
    batch=lambda device: (
        torch.randn(16, 3, 512, 512, device=device),
        torch.randint(0, 1000, (16,), device=device),
    ),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
)
