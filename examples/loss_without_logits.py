"""The same small language model with the usual loss, and with a loss that never holds the logits.

oomph predict examples/loss_without_logits.py:plain --gpu rtx4090
oomph predict examples/loss_without_logits.py:fused --gpu rtx4090
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oomph

VOCABULARY, WIDTH, LAYERS, HEADS = 128_256, 1024, 8, 16
BATCH, LENGTH = 4, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = oomph.nn.GatedMLP(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(oomph.ops.attention(q, k, v, causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class Model(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.fused:
            return oomph.ops.linear_cross_entropy(x, self.head.weight, tokens, shift=True)
        logits = self.head(x).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _workload(fused: bool) -> oomph.Workload:
    return oomph.Workload(
        model=lambda: Model(fused),
        batch=lambda device: torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device),
        loss=lambda model, tokens: model(tokens),
        dtype="bfloat16",
    )


def plain() -> oomph.Workload:
    return _workload(fused=False)


def fused() -> oomph.Workload:
    return _workload(fused=True)
