"""Numbers kept in 8 bits each, by blocks of 256 that share a scale: the format of 8-bit optimizers.

A block is divided by its largest magnitude; each number then becomes the nearest of 256 values between -1 and
1 (0 and 1 for what is never negative). The values are dense near zero: seven decades, each split evenly, the
larger the finer ("dynamic tree", arXiv 2110.02861), as in bitsandbytes and torchao.

Of an average of squares the root is kept. The average itself spans too much: what lies below 3e-7 of its
block's largest would be zero, and the next update, divided by its root, up to 30 times too long.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 256
_DECADES = 7
_SMALLEST_SCALE = 1e-12  # a block of zeros divides by this


@cache
def values(signed: bool) -> tuple[float, ...]:
    """The 256 numbers that a code stands for, in rising order."""
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, parts + 1, dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2).tolist()
        found += [10.0 ** (decade - _DECADES + 1) * middle for middle in middles]
        if signed:
            found += [-(10.0 ** (decade - _DECADES + 1)) * middle for middle in middles]
    return tuple(sorted(found))


def table(device: torch.device) -> Tensor:
    """[4, 256]: the values of signed and of unsigned codes, then the midpoints between neighbours."""
    rows = []
    for signed in (True, False):
        own = values(signed)
        between = [(low + high) / 2 for low, high in pairwise(own)]
        rows.append((list(own), [*between, float("inf")]))
    (signed_values, signed_edges), (unsigned_values, unsigned_edges) = rows
    return torch.tensor(
        [signed_values, unsigned_values, signed_edges, unsigned_edges], dtype=torch.float32, device=device
    )


def decoded(codes: Tensor, scales: Tensor, table: Tensor, signed: bool) -> Tensor:
    """Whole blocks of codes, flat, as float32; not signed: they are roots. The last block may be short."""
    found = table[0 if signed else 1].index_select(0, codes.int()).mul_(_spread(scales, codes.numel()))
    return found if signed else found.square_()


def encode(number: Tensor, codes: Tensor, scales: Tensor, table: Tensor, signed: bool) -> None:
    """Write flat float32 numbers into whole blocks of codes and scales. What is not finite stays so: its
    block's scale is not finite either."""
    size = number.numel()
    number = number if signed else number.sqrt()
    padded = number if size % BLOCK == 0 else torch.nn.functional.pad(number, (0, -size % BLOCK))
    torch.amax(padded.view(-1, BLOCK).abs(), 1, out=scales)
    scales.clamp_(min=_SMALLEST_SCALE)
    scaled = number / _spread(scales, size)
    codes.copy_(torch.bucketize(scaled, table[2 if signed else 3, :-1], out_int32=True))


def _spread(scales: Tensor, size: int) -> Tensor:
    return scales.view(-1, 1).expand(-1, BLOCK).reshape(-1)[:size]
