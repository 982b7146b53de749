"""The arguments of one call, checked: what the sizes are, and what a compressing map may be.

Legend: B batch, T tokens, H key/value heads, Q = H * G query heads, D head size, L tokens of a compressed
block, N compressed blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import matmul_dtype

Map = Callable[[Tensor], Tensor]  # blocks [B, N, L, H, D] -> [B, N, H, D]
Compress = str | Map | tuple[Map, Map]
IMPLS = ("auto", "triton", "chunked", "reference")


@dataclass(frozen=True)
class Sizes:
    """Who sees whom, in tokens. All the branches read it from here."""

    block: int  # of a selected block
    span: int  # tokens of a compressed block
    stride: int  # between the starts of compressed blocks
    top_n: int  # selected blocks of a token
    window: int  # nearest tokens, the token itself included
    scale: float

    def compressed(self, tokens: int) -> int:
        """How many compressed blocks a sequence has: those that lie in it entirely."""
        return 0 if tokens < self.span else (tokens - self.span) // self.stride + 1

    def blocks(self, tokens: int) -> int:
        """How many blocks there are to select from; the last may be short."""
        return -(-tokens // self.block)

    @property
    def units_of_block(self) -> int:
        """Strides in a selected block."""
        return self.block // self.stride

    @property
    def units_of_span(self) -> int:
        """Strides in a compressed block."""
        return self.span // self.stride

    def slots(self, tokens: int) -> int:
        """Places for selected blocks that a token needs: no more than there are blocks, but three."""
        return min(self.top_n, max(3, self.blocks(tokens)))


def make_sizes(
    head_size: int, block: int, span: int, stride: int, top_n: int, window: int, scale: float | None
) -> Sizes:
    _whole("compress_stride", stride, 1)
    _whole("compress_block", span, 1)
    _whole("block_size", block, 1)
    _whole("top_n", top_n, 3, "the first block and the two latest are always among them")
    _whole("window", window, 1, "the token itself is in it")
    for name, given in (("block_size", block), ("compress_block", span)):
        if given % stride:
            raise ArgumentError(f"{name}={given} is not a multiple of compress_stride={stride}")
    if scale is None:
        scale = 1.0 / math.sqrt(head_size)
    elif isinstance(scale, bool) or not isinstance(scale, int | float) or not 0.0 < scale < math.inf:
        raise ArgumentError(
            f"scale={scale!r} is not valid; a finite number above 0, or None for 1/sqrt(head size)"
        )
    return Sizes(block, span, stride, top_n, window, float(scale))


def _whole(name: str, given: object, least: int, why: str = "") -> None:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        reason = f" ({why})" if why else ""
        raise ArgumentError(f"{name}={given!r} is not valid; a whole number of at least {least}{reason}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> None:
    named = dict(zip(("gate_cmp", "gate_slc", "gate_win"), gates, strict=True))
    common.check_floating(q=q, k=k, v=v, **named)
    common.check_same_device(q=q, k=k, v=v, **named)
    given = f"given q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    valid = "valid: q [B, T, HQ, D], k and v [B, T, H, D] with HQ a multiple of H"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ArgumentError(f"q, k and v must have 4 dimensions; {given}; {valid}")
    if k.shape != v.shape:
        raise ArgumentError(f"k and v differ in shape; {given}; {valid}")
    if q.shape[:2] != k.shape[:2]:
        raise ArgumentError(f"q and k differ in batch size or length; {given}; {valid}")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ArgumentError(f"q and k must have one head size, at least 1; {given}; {valid}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ArgumentError(f"query heads are not a multiple of key/value heads; {given}; {valid}")
    for name, gate in named.items():
        if gate.shape != q.shape[:3]:
            raise ArgumentError(f"{name} has shape {list(gate.shape)}; valid: {list(q.shape[:3])}")
    if len({matmul_dtype(x) for x in (q, k, v)}) > 1:
        common.check_same_dtype(q=q, k=k, v=v)


def in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of their products: their own, or autocast's."""
    dtype = matmul_dtype(q)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check_compressed(given: object, which: str, expected: torch.Size, like: Tensor) -> Tensor:
    """What a compressing map returned, if it is of the right shape, dtype and device."""
    if not isinstance(given, Tensor):
        raise ArgumentError(f"compress returned a {type(given).__name__} for {which}; valid: a tensor")
    if given.shape != expected:
        raise ArgumentError(
            f"compress returned shape {list(given.shape)} for {which}; valid: {list(expected)}"
        )
    if given.dtype != like.dtype or given.device != like.device:
        raise ArgumentError(
            f"compress returned {given.dtype} on {given.device} for {which}; "
            f"valid: {like.dtype} on {like.device}"
        )
    return given
