"""The loss shifts the logits by one token and copies all of them to do so."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload

VOCABULARY = 50_304


def shifted_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    targets = tokens[:, 1:].contiguous().view(-1)
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, VOCABULARY), targets)  # PLANTED


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 256)
        self.head = nn.Linear(256, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


workload = Workload(
    model=Model,
    batch=lambda device: torch.randint(0, VOCABULARY, (16, 1024), device=device),
    loss=lambda model, tokens: shifted_loss(model(tokens), tokens),
)
