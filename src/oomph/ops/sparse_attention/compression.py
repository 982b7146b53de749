"""Keys and values of overlapping blocks, compressed to one each, by a learned map or the mean.

Ordinary differentiable torch: the map's parameters get their gradients from autograd. Memory is O(T): the
blocks are a view, in which every token appears compress_block / compress_stride times.
"""

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.sparse_attention.problem import Compress, Map, Sizes, check_compressed


def maps_of(compress: Compress) -> tuple[Map | None, Map | None]:
    """The maps for keys and for values; None for the mean."""
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


def compressed_pair(k: Tensor, v: Tensor, compress: Compress, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Compressed keys and values, [B, N, H, D] each; N may be 0, and then no map is called."""
    for_keys, for_values = maps_of(compress)
    return _compressed(k, "keys", for_keys, sizes), _compressed(v, "values", for_values, sizes)


def _compressed(x_BTHD: Tensor, which: str, function: Map | None, sizes: Sizes) -> Tensor:
    batch, tokens, heads, width = x_BTHD.shape
    count = sizes.compressed(tokens)
    expected = torch.Size((batch, count, heads, width))
    if 0 in (count, batch):
        return x_BTHD.new_empty(expected)
    if function is None:
        return _mean(x_BTHD, count, sizes)
    # unfold puts the tokens of a block last; a view either way.
    blocks_BNLHD = x_BTHD.unfold(1, sizes.span, sizes.stride).permute(0, 1, 4, 2, 3)
    return check_compressed(function(blocks_BNLHD), which, expected, x_BTHD)


def _mean(x_BTHD: Tensor, count: int, sizes: Sizes) -> Tensor:
    """Means of the strides first, which do not overlap: every token is read once."""
    batch, _, heads, width = x_BTHD.shape
    overlap = sizes.units_of_span
    units = count + overlap - 1
    x_BUSHD = x_BTHD[:, : units * sizes.stride].reshape(batch, units, sizes.stride, heads, width)
    # In at least float32: a mean of means that were rounded to half precision would be rounded twice.
    wide = torch.promote_types(x_BTHD.dtype, torch.float32)
    units_BUHD = x_BUSHD.mean(2, dtype=wide)
    total = units_BUHD[:, :count]
    for shift in range(1, overlap):
        total = total + units_BUHD[:, shift : shift + count]
    return (total / overlap).to(x_BTHD.dtype)
