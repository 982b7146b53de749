"""Each layer registers its own copy of the same long rotary table."""

import torch
from torch import nn

from oomph import Workload


def rotary_table(length: int, width: int) -> torch.Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


class Layer(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width, bias=False)
        self.register_buffer("rope", rotary_table(length, width), persistent=False)  # PLANTED

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rope[:, : x.shape[1]]
        even, odd = self.project(x).chunk(2, dim=-1)
        return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)


workload = Workload(
    model=lambda: nn.Sequential(*[Layer(128, 262_144) for _ in range(24)]),
    batch=lambda device: torch.randn(1, 2048, 128, device=device),
    loss=lambda model, x: model(x).square().mean(),
)
