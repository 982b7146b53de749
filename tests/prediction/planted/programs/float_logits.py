"""A language model whose bfloat16 logits are copied to float32 before the loss."""

import torch
import torch.nn.functional as F
from torch import nn

from oomph import Workload

VOCABULARY = 128_256


class TinyLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 512)
        self.block = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU())
        self.head = nn.Linear(512, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embed(tokens[:, :-1]))
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), tokens[:, 1:].flatten())  # PLANTED


workload = Workload(
    model=TinyLanguageModel,
    batch=lambda device: torch.randint(0, VOCABULARY, (4, 4097), device=device),
    loss=lambda model, tokens: model(tokens),
    dtype="bfloat16",
)
