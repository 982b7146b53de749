"""A big pretrained table that is looked up and never trained."""

import torch
from torch import nn

from oomph import Workload


class Retriever(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entities = nn.Embedding(5_000_000, 256)  # PLANTED
        self.entities.requires_grad_(False)
        self.score = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.score(self.entities(ids))


workload = Workload(
    model=Retriever,
    batch=lambda device: torch.randint(0, 5_000_000, (1024, 16), device=device),
    loss=lambda model, ids: model(ids).square().mean(),
)
