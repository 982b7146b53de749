"""Shifted copies of a sequence, made in a comprehension inside a nested function."""

import torch
from torch import nn

from oomph import Workload


class ShiftMixer(nn.Module):
    def __init__(self, width: int, shifts: int) -> None:
        super().__init__()
        self.shifts = shifts
        self.weights = nn.Parameter(torch.ones(shifts))
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)

        def mixed() -> torch.Tensor:
            shifted = [x.roll(shift, dims=1) for shift in range(self.shifts)]  # PLANTED
            total = shifted[0] * self.weights[0]
            for copy, weight in zip(shifted[1:], self.weights[1:], strict=True):
                total.addcmul_(copy, weight)
            return total

        return mixed()


workload = Workload(
    model=lambda: ShiftMixer(512, shifts=12),
    batch=lambda device: torch.randn(16, 4096, 512, device=device),
    loss=lambda model, x: model(x).square().mean(),
)
