"""The weight deltas themselves: a few tokens' for inspection, and every token's norm without the delta."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import no_autocast
from oomph.ops.modulation.checks import check_factors
from oomph.units import counted

TokenIndex = int | slice | Sequence[int] | Tensor | tuple[int | slice, ...]


def compute_weight_delta(A: Tensor, B: Tensor, mod: Tensor, token_idx: TokenIndex) -> Tensor:
    """A diag(mod) B of the tokens asked for, each [d, f]. Differentiable; all of it is held: ask for few.

    mod [..., S, r]. A tuple picks by every leading dimension of mod: (b, s) gives [d, f]. An int picks
    along S alone and gives [..., d, f]; n tokens along S (a list, slice or integer tensor): [..., n, d, f].
    """
    common.check_floating(A=A, B=B, mod=mod)
    check_factors(A, B, mod)
    lead = mod.dim() - 1
    if isinstance(token_idx, tuple):
        if len(token_idx) != lead:
            raise ArgumentError(
                f"token_idx={token_idx} has {counted(len(token_idx), 'number')}; mod {list(mod.shape)} "
                f"takes {lead} in a tuple, or one int or list for its last dimension but one"
            )
        index: tuple[Any, ...] = tuple(
            _checked(each, size) for each, size in zip(token_idx, mod.shape, strict=False)
        )
    elif lead == 0:
        raise ArgumentError(f"mod {list(mod.shape)} has no tokens to choose from; give token_idx=()")
    else:
        index = (..., _checked(token_idx, mod.shape[-2]), slice(None))
    wide = torch.promote_types(torch.promote_types(A.dtype, B.dtype), mod.dtype)
    with no_autocast(mod):
        chosen = mod[index].to(wide)
        return (A.to(wide) * chosen.unsqueeze(-2)) @ B.to(wide)


def weight_delta_norm(A: Tensor, B: Tensor, mod: Tensor, *, squared: bool = False) -> Tensor:
    """The Frobenius norm of A diag(mod) B per token, [...] for mod [..., r], without the delta.

    ||A diag(m) B||^2 = m^T ((A^T A) * (B B^T)) m, in float32 (float64 where an input is float64). Where the
    norm is zero, as at the start of training with B = 0, its gradient is defined as zero.
    """
    common.check_floating(A=A, B=B, mod=mod)
    check_factors(A, B, mod)
    wide = torch.float64 if torch.float64 in (A.dtype, B.dtype, mod.dtype) else torch.float32
    with no_autocast(mod):
        A, B, mod = A.to(wide), B.to(wide), mod.to(wide)
        gram_rr = (A.t() @ A) * (B @ B.t())
        # Never negative but for rounding.
        square = ((mod @ gram_rr) * mod).sum(dim=-1).clamp(min=0)
        if squared:
            return square
        zero = square <= 0  # false for NaN, which stays NaN
        return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _checked(index: object, size: int) -> int | slice | list[int] | Tensor:
    """An index that is inside. A tensor's numbers are left to torch: reading them waits for the device."""
    if isinstance(index, slice):
        return index
    if isinstance(index, Tensor) and index.dim() > 0:
        if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise ArgumentError(f"token_idx has dtype {index.dtype}; valid: integers")
        return index
    if isinstance(index, Sequence) and not isinstance(index, str):
        return [_inside(each, size) for each in index]
    return _inside(index, size)


def _inside(index: object, size: int) -> int:
    try:
        number = operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"token_idx {index!r} is not valid; give ints, a list or a tuple") from None
    if isinstance(index, bool) or not -size <= number < size:
        raise ArgumentError(f"token_idx {index!r} is not valid; the tokens are 0 to {size - 1}")
    return number
