"""A language model as in many tutorials, too large for its GPU; and a small one for `oomph verify`.

oomph fixes examples/fixes.py:workload --gpu rtx4090
oomph predict examples/fixes.py:workload --gpu rtx4090 --fix fused_attention --fix fused_linear_cross_entropy
oomph verify examples/fixes.py:small fused_attention fused_linear_cross_entropy
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oomph


class Block(nn.Module):
    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, heads, longest) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(device: torch.device, B: int, T: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 100, (B, T + 1), device=device)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


workload = oomph.Workload(
    lambda: Model(50304, 1024, 16, 6, 2048), batch, loss, dtype="bfloat16", sizes={"B": 12, "T": 2048}
)
small = oomph.Workload(lambda: Model(211, 32, 4, 3, 64), batch, loss, sizes={"B": 4, "T": 40})
