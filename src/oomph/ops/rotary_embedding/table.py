"""The cosines and sines of rotary embedding, for the positions asked.

An angle is position x frequency. At position 1,000,000 neighbouring float32 numbers are 0.06 apart, so an
angle held in float32 is wrong in its second digit, and in bfloat16 (the dtype a model's own buffers get)
positions themselves fall together: 131,072 of them are 1,409 different numbers. So angles are float64 here,
which leaves an error near 1e-10 rad at a million positions, and only their cosine and sine are rounded, once.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.common import check_number, check_one_of
from oomph.units import MiB

# One slice's float64 angles; their cosine takes the same again, so a table needs 2 x 16 MiB beside itself.
_SLICE_BYTES = 16 * MiB
_POSITION_FLOATS = (torch.float32, torch.float64)  # float32 counts exactly up to 2**24
_POSITION_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)  # tensors have no single answer to ==
class RotaryTable:
    """Cosine and sine of every (position, frequency), each [..., dim/2], in float32 (float64 for float64 q).

    FSDP2's mixed precision casts the tensors of dataclasses among a module's arguments, too; `oomph.parallel`
    turns that off for blocks.
    """

    cos: Tensor
    sin: Tensor


@torch.no_grad()
def rotary_table(
    positions: Tensor, dim: int, *, theta: float = 10000.0, dtype: torch.dtype = torch.float32
) -> RotaryTable:
    """The table for `positions` (integers, float32 or float64; any shape), on their device.

    dim: how many numbers of a head are rotated (even). dtype: float64 is for float64 queries. Angles are
    float64, a slice of positions at a time, so 32 MiB suffice beside the result at any length. Positions get
    no gradient.
    """
    check_frequencies(dim, theta)
    check_positions(positions)
    check_one_of("dtype", dtype, (torch.float32, torch.float64))
    # theta**(-2i/dim) for i < dim/2: radians per position. exp rather than pow, which autocast may round.
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    frequencies = (exponents * (-math.log(theta) / dim)).exp()
    if torch.compiler.is_compiling():  # the compiler fuses the whole; there are no slices to hold
        angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
        return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))
    flat = positions.reshape(-1)
    cos = torch.empty((flat.numel(), dim // 2), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    step = max(1, _SLICE_BYTES // (8 * (dim // 2)))
    for start in range(0, flat.numel(), step):
        rows = slice(start, start + step)
        angles = flat[rows].to(torch.float64).unsqueeze(-1) * frequencies
        cos[rows].copy_(angles.cos())
        sin[rows].copy_(angles.sin_())
    shape = (*positions.shape, dim // 2)
    return RotaryTable(cos.view(shape), sin.view(shape))


def check_frequencies(dim: int, theta: float) -> None:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim % 2 or not 2 <= dim < 2**31:
        raise ArgumentError(f"dim={dim!r} is not valid; rotary rotates pairs, so dim is an even number >= 2")
    check_number("a number > 1, e.g. 10000.0", lambda number: 1 < number < math.inf, theta=theta)


def check_positions(positions: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise ArgumentError(f"positions is a {type(positions).__name__}, not a tensor of positions")
    if positions.dtype not in (*_POSITION_INTEGERS, *_POSITION_FLOATS):
        raise ArgumentError(
            f"positions has dtype {positions.dtype}; valid: integers, float32, float64 "
            "(16-bit floats cannot tell 2049 from 2048, nor bfloat16 257 from 256)"
        )
    if positions.requires_grad:
        raise ArgumentError(
            "positions requires a gradient, which rotary does not compute; pass positions.detach()"
        )
