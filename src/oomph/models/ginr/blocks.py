"""The blocks of encoder and decoder; what a report names has its name here.

Legend: B images, N positions, K tokens of the context, C features, H heads, E features of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from oomph.nn import GatedMLP
from oomph.ops import attention
from oomph.ops.softmax_attention.biases import LocalityBias

MIXINGS = ("self", "cross", "feedforward", "residual")


class Attention(nn.Module):
    """Of positions to each other, or with `context_dim` to a context; nothing of size N x N is held."""

    def __init__(
        self, query_dim: int, context_dim: int | None = None, heads: int = 8, dim_head: int = 64
    ) -> None:
        super().__init__()
        context_dim = query_dim if context_dim is None else context_dim
        self.heads, self.dim_head = heads, dim_head
        inner = heads * dim_head
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, x: Tensor, context: Tensor | None = None, bias: LocalityBias | None = None) -> Tensor:
        """x [B, N, C], or [1, N, C] for the same positions in every image; context [B, K, c] -> [B, N, C]."""
        context = x if context is None else context
        q, k, v = (
            self._by_head(to(of)) for to, of in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        out_BHNE = self.attend(q.expand(k.shape[0], -1, -1, -1), k, v, bias)
        out: Tensor = self.to_out(out_BHNE.transpose(1, 2).flatten(2))
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: LocalityBias | None) -> Tensor:
        return attention(q, k, v, bias=bias)

    def _by_head(self, x_BNI: Tensor) -> Tensor:
        return x_BNI.unflatten(-1, (self.heads, self.dim_head)).transpose(1, 2)


class FeedForward(GatedMLP):
    """GEGLU over mult times as many features: `down(gelu(gate x) * up x)`; the wide features are not kept."""

    def __init__(self, dim: int, mult: int = 4) -> None:
        super().__init__(dim, dim * mult, "gelu", bias=True)


class PreNorm(nn.Module):
    """fn(norm(x)), and with context_dim fn(norm(x), norm(context))."""

    def __init__(self, dim: int, fn: nn.Module, context_dim: int | None = None) -> None:
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)
        self.norm_context = None if context_dim is None else nn.LayerNorm(context_dim)

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        inputs = [self.norm(x)]
        if self.norm_context is not None:
            inputs.append(self.norm_context(context))
        out: Tensor = self.fn(*inputs, **options)
        return out


class ResidualBlock(nn.Module):
    """x + W2 ReLU(W1 x): the block of the original decoder, each position by itself."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(F.relu(self.fc1(x)))
        return out


@dataclass(frozen=True)
class Parts:
    """The classes that blocks are made of."""

    attention: type[Attention] = Attention
    feed_forward: type[FeedForward] = FeedForward


@dataclass(frozen=True)
class Mixing:
    """How a block mixes positions, and its sizes.

    kind: "self" (positions attend to each other), "cross" (each to the latents), "feedforward" (a second
    feed-forward instead of attention), "residual" (a ResidualBlock instead of both).
    """

    kind: str
    dim: int
    context_dim: int
    heads: int = 8
    dim_head: int = 64
    mult: int = 4
    parts: Parts = Parts()


class MixingBlock(nn.Module):
    """Two residual sublayers, of which the first is `Mixing.kind` and the second a feed-forward."""

    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self.kind = kind = mixing.kind
        dim, parts = mixing.dim, mixing.parts
        self.mix: nn.Module
        self.feed: nn.Module | None = None
        if kind == "residual":
            self.mix = ResidualBlock(dim)
            return
        self.feed = PreNorm(dim, parts.feed_forward(dim, mult=mixing.mult))
        if kind == "feedforward":
            self.mix = PreNorm(dim, parts.feed_forward(dim, mult=mixing.mult))
            return
        context_dim = mixing.context_dim if kind == "cross" else None
        attend = parts.attention(dim, context_dim, heads=mixing.heads, dim_head=mixing.dim_head)
        self.mix = PreNorm(dim, attend, context_dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """x [B, N, C] or [1, N, C] -> the same; with kind "cross", [B, N, C] for the context's B."""
        if self.feed is None:
            mixed: Tensor = self.mix(x)
            return mixed
        x = x + (self.mix(x, context) if self.kind == "cross" else self.mix(x))
        out: Tensor = x + self.feed(x)
        return out
