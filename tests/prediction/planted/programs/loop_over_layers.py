"""No layer is large, but one line runs all forty-eight of them and keeps what each one needs."""

import torch
from torch import nn

from oomph import Workload


class DeepNetwork(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(depth))
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))  # PLANTED
        return self.head(x)


workload = Workload(
    model=lambda: DeepNetwork(48),
    batch=lambda device: torch.randn(32_768, 64, device=device),
    loss=lambda model, x: model(x).square().mean(),
)
