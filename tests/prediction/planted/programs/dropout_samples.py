"""Monte-Carlo dropout: 32 masks of every activation at once."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload


class Regressor(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self.hidden = nn.Linear(512, 4096)
        self.out = nn.Linear(4096, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x).relu()
        return self.out(F.dropout(hidden.expand(self.samples, -1, -1), p=0.1))  # PLANTED


workload = Workload(
    model=lambda: Regressor(samples=32),
    batch=lambda device: torch.randn(8192, 512, device=device),
    loss=lambda model, x: model(x).var(0).mean(),
)
