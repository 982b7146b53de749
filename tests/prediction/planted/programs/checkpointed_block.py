"""Checkpointed blocks: what one of them recomputes in the backward pass holds the peak."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomph import Workload


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x)).exp()  # PLANTED
        return x + self.down(inner)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(256, 16_384) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


workload = Workload(
    model=Stack,
    batch=lambda device: torch.randn(16, 2048, 256, device=device),
    loss=lambda model, x: model(x).square().mean(),
)
