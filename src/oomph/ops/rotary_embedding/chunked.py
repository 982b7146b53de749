"""Rotary embedding in plain torch: one output, and temporaries of one slice of tokens.

Legend: B batch, H heads, T tokens, D head size, P pairs that are turned (R = 2P numbers).
"""

import torch
from torch import Tensor

from oomph.units import MiB

EVERY = -1  # of the heads
_SLICE_BYTES = 4 * MiB  # of float32 numbers in one slice: stays in a CPU's cache, and small beside any model


def rotate_in_slices(
    x_BHTD: Tensor,
    cos_BTP: Tensor,
    sin_BTP: Tensor,
    interleaved: bool,
    inverse: bool,
    turned_heads: int = EVERY,
) -> Tensor:
    """x turned by the angles (by minus the angles when `inverse`), in the table's dtype, rounded to x's.

    Heads after the first `turned_heads` are copied.
    """
    whole = torch.empty_like(x_BHTD)
    out = whole
    if turned_heads != EVERY:
        out[:, turned_heads:].copy_(x_BHTD[:, turned_heads:])
        out, x_BHTD = out[:, :turned_heads], x_BHTD[:, :turned_heads]
    batch, heads, tokens, size = x_BHTD.shape
    pairs = cos_BTP.shape[-1]
    if 2 * pairs < size:
        out[..., 2 * pairs :].copy_(x_BHTD[..., 2 * pairs :])
    sign = -1.0 if inverse else 1.0
    token_bytes = max(1, batch * heads * 2 * pairs * cos_BTP.element_size())
    step = max(1, _SLICE_BYTES // token_bytes)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        cos, sin = cos_BTP[:, None, part], sin_BTP[:, None, part]
        x1, x2 = (half.to(cos.dtype) for half in _halves(x_BHTD[:, :, part], pairs, interleaved))
        out1, out2 = _halves(out[:, :, part], pairs, interleaved)
        out1.copy_((x1 * cos).addcmul_(x2, sin, value=-sign))
        out2.copy_((x2 * cos).addcmul_(x1, sin, value=sign))
    return whole


def _halves(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]
