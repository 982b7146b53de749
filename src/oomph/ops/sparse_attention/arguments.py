"""The arguments of nsa, checked, and the compression of keys and values.

B batch, T tokens, H key/value heads, Q = H * G query heads, D head size, L tokens of a compressed block,
N compressed blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import matmul_dtype

Compressor = Callable[[Tensor], Tensor]  # blocks [B, N, L, H, D] -> [B, N, H, D]
Compress = str | Compressor | tuple[Compressor, Compressor]
IMPLS = ("auto", "triton", "chunked", "reference")


@dataclass(frozen=True)
class NSAConfig:
    """Sizes in tokens, named as the options of nsa."""

    block_size: int
    compress_block: int
    compress_stride: int
    top_n: int
    window: int
    scale: float

    def __post_init__(self) -> None:
        common.check_whole(
            compress_stride=self.compress_stride,
            compress_block=self.compress_block,
            block_size=self.block_size,
            window=self.window,
        )
        common.check_whole(3, ": the first block and the two latest are always selected", top_n=self.top_n)
        for name in ("block_size", "compress_block"):
            if getattr(self, name) % self.compress_stride:
                multiple = f"a multiple of compress_stride={self.compress_stride}"
                raise ArgumentError(f"{name}={getattr(self, name)} is not {multiple}")

    @staticmethod
    def create(head_dim: int, *, scale: float | None = None, **sizes: int) -> "NSAConfig":
        """`scale` defaults to 1/sqrt(head_dim)."""
        scale = common.scale_or_default(scale, 1.0 / math.sqrt(head_dim))
        common.check_number("a number > 0", lambda number: number > 0, scale=scale)
        return NSAConfig(**sizes, scale=scale)

    def compressed_blocks(self, tokens: int) -> int:
        """Compressed blocks that lie entirely in the sequence."""
        return (
            0 if tokens < self.compress_block else (tokens - self.compress_block) // self.compress_stride + 1
        )

    def blocks(self, tokens: int) -> int:
        """Blocks to select from; the last may be short."""
        return -(-tokens // self.block_size)

    def slots(self, tokens: int) -> int:
        """Selected blocks per token: top_n, but no more than there are blocks, and at least three."""
        return min(self.top_n, max(3, self.blocks(tokens)))

    @property
    def strides_per_block(self) -> int:
        return self.block_size // self.compress_stride

    @property
    def strides_per_compressed(self) -> int:
        return self.compress_block // self.compress_stride


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
    common.check_shape(q.shape[:3], "", **named)
    if len({matmul_dtype(x) for x in (q, k, v)}) > 1:
        common.check_same_dtype(q=q, k=k, v=v)


# Compression: ordinary differentiable torch, so autograd gives the gradients of a compressor's parameters.
# Blocks are a view, in which every token appears compress_block / compress_stride times.


def check_compress(compress: Compress) -> tuple[Compressor | None, Compressor | None]:
    """The compressors of keys and of values; None for the mean."""
    if isinstance(compress, str) and compress == "mean":
        return None, None
    if callable(compress):
        return compress, compress
    if isinstance(compress, tuple) and len(compress) == 2 and all(callable(each) for each in compress):
        return compress
    raise ArgumentError(
        f"compress={compress!r} is not valid; 'mean', a function of blocks [B, N, L, H, D] that returns "
        "[B, N, H, D], or a pair of such functions for keys and values"
    )


def compress_keys_and_values(
    k: Tensor, v: Tensor, compress: Compress, config: NSAConfig
) -> tuple[Tensor, Tensor]:
    """Compressed keys and values, [B, N, H, D] each; where N is 0, no compressor is called."""
    for_keys, for_values = check_compress(compress)
    return _compress(k, "keys", for_keys, config), _compress(v, "values", for_values, config)


def _compress(x_BTHD: Tensor, which: str, compressor: Compressor | None, config: NSAConfig) -> Tensor:
    batch, tokens, heads, head_dim = x_BTHD.shape
    count = config.compressed_blocks(tokens)
    expected = torch.Size((batch, count, heads, head_dim))
    if 0 in (count, batch):
        return x_BTHD.new_empty(expected)
    if compressor is None:
        return _mean(x_BTHD, count, config)
    blocks_BNLHD = x_BTHD.unfold(1, config.compress_block, config.compress_stride).permute(0, 1, 4, 2, 3)
    result = compressor(blocks_BNLHD)
    if not isinstance(result, Tensor):
        raise ArgumentError(f"compress returned a {type(result).__name__} for {which}; valid: a tensor")
    if result.shape != expected:
        raise ArgumentError(
            f"compress returned shape {list(result.shape)} for {which}; valid: {list(expected)}"
        )
    if result.dtype != x_BTHD.dtype or result.device != x_BTHD.device:
        raise ArgumentError(
            f"compress returned {result.dtype} on {result.device} for {which}; "
            f"valid: {x_BTHD.dtype} on {x_BTHD.device}"
        )
    return result


def _mean(x_BTHD: Tensor, count: int, config: NSAConfig) -> Tensor:
    """Means of the strides first, which do not overlap: every token is read once."""
    batch, _, heads, head_dim = x_BTHD.shape
    overlap = config.strides_per_compressed
    strides = count + overlap - 1
    used = x_BTHD[:, : strides * config.compress_stride]
    x_BUSHD = used.reshape(batch, strides, config.compress_stride, heads, head_dim)
    # In at least float32: a mean of means rounded to half precision would be rounded twice.
    means_BUHD = x_BUSHD.mean(2, dtype=torch.promote_types(x_BTHD.dtype, torch.float32))
    total = means_BUHD[:, :count]
    for shift in range(1, overlap):
        total = total + means_BUHD[:, shift : shift + count]
    return (total / overlap).to(x_BTHD.dtype)
