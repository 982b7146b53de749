"""A feed-forward block whose inner width is 32 times the outer one."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.norm(x)))  # PLANTED
        return x + self.down(hidden)


workload = Workload(
    model=lambda: nn.Sequential(FeedForward(256, 8192), FeedForward(256, 8192)),
    batch=lambda device: torch.randn(32, 2048, 256, device=device),
    loss=lambda model, x: model(x).square().mean(),
    autocast="bfloat16",
)
