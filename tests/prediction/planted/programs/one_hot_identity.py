"""A bag-of-words encoder that makes its one-hot vectors by indexing an identity matrix."""

import torch
from torch import nn

from oomph import Workload

VOCABULARY = 32768


def one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return torch.eye(VOCABULARY, device=tokens.device)[tokens]  # PLANTED


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(VOCABULARY, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.project(one_hot(tokens))


workload = Workload(
    model=BagOfWords,
    batch=lambda device: torch.randint(0, VOCABULARY, (8, 1024), device=device),
    loss=lambda model, tokens: model(tokens).square().mean(),
)
