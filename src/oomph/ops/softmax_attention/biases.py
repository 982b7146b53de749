"""Biases computed from indices instead of stored as a matrix, and block-sparse patterns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.common import check_one_of, check_whole


@runtime_checkable
class BiasFunction(Protocol):
    """The term added to the scaled score of query `q_index` and key `k_index` in batch b and head h.

    The four arguments are integer tensors that broadcast against each other; the result must broadcast with
    them. Use elementwise arithmetic and indexing only, no branches on values.

    List the tensors that the function reads in an attribute `tensors`: gradients flow to those. A function
    that reads a tensor which requires a gradient and does not list it is refused.
    """

    def __call__(self, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class LocalityBias:
    """-strength * |t - s|^2 between the query's point t and the key's point s.

    Points are stored as [d, N] or [B, d, N], so that kernels read one coordinate of neighbouring points with
    coalesced loads.
    """

    query_points: Tensor
    key_points: Tensor
    strength: float = 10.0

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return (self.query_points, self.key_points)

    def __call__(self, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        t, s = self.query_points, self.key_points
        distance: Tensor | None = None
        for axis in range(t.shape[-2]):  # one coordinate at a time: no [..., d] temporary
            t_axis = t[b, axis, q_index] if t.dim() == 3 else t[axis][q_index]
            s_axis = s[b, axis, k_index] if s.dim() == 3 else s[axis][k_index]
            difference = t_axis - s_axis
            square = difference * difference
            distance = square if distance is None else distance + square
        assert distance is not None
        return distance * -self.strength

    def check_shape(self, batch: int, queries: int, keys: int) -> None:
        for name, points, length in (("t", self.query_points, queries), ("s", self.key_points, keys)):
            if points.shape[-1] != length or (points.dim() == 3 and points.shape[0] != batch):
                given = (*points.shape[:-2], points.shape[-1], points.shape[-2])
                raise ArgumentError(
                    f"locality_bias {name} has shape {given}; "
                    f"valid here: [{length}, d] or [{batch}, {length}, d]"
                )


def locality_bias(t: Tensor, s: Tensor, strength: float = 10.0) -> LocalityBias:
    """The bias -strength * |t - s|^2 between query points t and key points s, each [N, d] or [B, N, d].

    Computed in fp32 (float64 if the points are), whatever the dtype of the attention: in bf16 squared
    distances are off by whole units of score. Differentiable in t and s.
    """
    for name, points in (("t", t), ("s", s)):
        if not isinstance(points, Tensor) or points.dim() not in (2, 3) or not points.is_floating_point():
            given = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
            raise ArgumentError(f"locality_bias {name} is {given}; valid: a float tensor [N, d] or [B, N, d]")
    if t.shape[-1] != s.shape[-1] or t.shape[-1] == 0:
        raise ArgumentError(
            f"locality_bias needs points of one dimension; given t with {t.shape[-1]}, s with {s.shape[-1]}"
        )
    dtype = torch.float64 if torch.float64 in (t.dtype, s.dtype) else torch.float32
    t, s = (points.to(dtype).transpose(-1, -2).contiguous() for points in (t, s))
    return LocalityBias(t, s, float(strength))


def declared_tensors(bias: BiasFunction) -> Sequence[Tensor]:
    """The tensors that a bias function lists as read."""
    return tuple(getattr(bias, "tensors", ()))


def has_undeclared_gradient(bias: BiasFunction, device: torch.device) -> bool:
    """Whether a function without `tensors` depends on a tensor that requires a gradient."""
    if hasattr(bias, "tensors") or not torch.is_grad_enabled():
        return False
    index = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    value = bias(index, index, index, index)
    return isinstance(value, Tensor) and value.requires_grad


PATTERN_KINDS = ("local", "global", "mixed")


@dataclass(frozen=True)
class BlockPattern:
    """Which blocks of keys a block of queries attends to, before the causal mask.

    local:  the blocks at most `window` blocks away, on either side.
    global: every `stride`-th block of the keys (0, stride, ...), and the query's own block.
    mixed:  both.

    Positions are divided into blocks of `block`. Query i has position i + K - Q, so that during generation
    the newest query is at the newest key.
    """

    kind: str
    block: int = 64
    window: int = 1
    stride: int = 2

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, PATTERN_KINDS)
        for name, smallest in (("block", 1), ("window", 0), ("stride", 1)):
            check_whole(smallest, **{name: getattr(self, name)})

    def key_blocks(self, query_block: int, total: int, causal: bool = False) -> list[int]:
        """The blocks, out of `total`, that query block `query_block` attends to, in increasing order."""
        blocks: set[int] = {query_block}
        if self.kind in ("local", "mixed"):
            blocks.update(range(query_block - self.window, query_block + self.window + 1))
        if self.kind in ("global", "mixed"):
            blocks.update(range(0, total, self.stride))
        last = min(total - 1, query_block) if causal else total - 1
        return sorted(block for block in blocks if 0 <= block <= last)

    def count(self, length: int, causal: bool = False) -> tuple[int, int]:
        """(blocks attended to, blocks in total) for self-attention over `length` positions."""
        total = -(-length // self.block)
        return sum(len(self.key_blocks(i, total, causal)) for i in range(total)), total * total


def local(window: int = 1, block: int = 64) -> BlockPattern:
    """Only the blocks at most `window` away."""
    return BlockPattern("local", block, window=window)


def global_(stride: int = 2, block: int = 64) -> BlockPattern:
    """Every `stride`-th block of the keys, and the query's own."""
    return BlockPattern("global", block, stride=stride)


def mixed(window: int = 1, stride: int = 4, block: int = 64) -> BlockPattern:
    """The union of `local(window)` and `global_(stride)`."""
    return BlockPattern("mixed", block, window=window, stride=stride)
