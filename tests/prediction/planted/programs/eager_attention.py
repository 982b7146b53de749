"""A decoder layer that materialises its attention probabilities."""

import math

import torch
from torch import nn

from oomph import Workload


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        probabilities = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)  # PLANTED
        mixed = probabilities @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(1024, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x)


workload = Workload(
    model=Decoder,
    batch=lambda device: torch.randn(2, 8192, 1024, device=device, dtype=torch.bfloat16),
    loss=lambda model, x: model(x).float().square().mean(),
    dtype="bfloat16",
)
