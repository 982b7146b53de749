"""The public functions: arguments are checked, an implementation is chosen, and it runs.

Every token t has its own weight, W + A diag(mod_t) B. Since h (A diag(m) B) = ((h A) * m) B, the weights of
tokens are never computed.
"""

from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.modulation import autograd
from oomph.ops.modulation.weights import Int8Weight
from oomph.units import counted

TokenIndex = int | tuple[int, ...]


def modulated_linear_reference(
    h: Tensor, weight: Tensor, A: Tensor, B: Tensor, mod: Tensor, bias: Tensor | None = None
) -> Tensor:
    """h [..., d], weight [d, f], A [d, r], B [r, f], mod [..., r], bias [f] -> [..., f]; all of one dtype."""
    y = h @ weight + ((h @ A) * mod) @ B
    return y if bias is None else y + bias


def choose(h: Tensor, impl: str, **others: Any) -> common.Choice:
    common.check_one_of("impl", impl, ("auto", "reference", "chunked"))
    _check_arguments(h, **others)
    if impl != "auto":
        return common.Choice(impl, common.ASKED_FOR)
    return common.Choice("chunked", "products with the low-rank factors; no weight of a token is computed")


@common.explained_by(choose)
@common.opaque_op
def modulated_linear(
    h: Tensor,
    weight: Tensor | Int8Weight,
    A: Tensor,
    B: Tensor,
    mod: Tensor,
    bias: Tensor | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """h @ weight + ((h @ A) * mod) @ B + bias: every token has its own weight, `weight + A diag(mod) B`.

    h [..., d], weight [d, f] (a view such as `linear.weight.t()` is used in place), A [d, r], B [r, f],
    bias [f] -> [..., f]. mod [..., r] has h's leading shape or broadcasts to it; its gradient is summed over
    what was broadcast.

    dtypes: the products run in h's dtype (under autocast, autocast's) with float32 accumulation, and the
    result has it. The others may have any float dtype, which their gradients have too. A weight of another
    dtype, or an `Int8Weight`, is converted in slices of at most 32 MiB, never as a whole.

    Exact gradients for all but an 8-bit weight; a frozen input's work is skipped. Saved for backward: inputs,
    and h @ A [..., r]; h itself only where A or weight is trained. A gradient of gradients is refused, except
    by impl="reference".

    impl: "auto", "chunked", "reference" (the plain expression, through autograd).
    """
    choice = common.log_choice("modulated_linear", choose(**locals()))
    dtype = common.matmul_dtype(h)
    if choice.impl == "reference":
        whole = weight.dequantize() if isinstance(weight, Int8Weight) else weight
        others = (None if each is None else each.to(dtype) for each in (A, B, mod, bias))
        return modulated_linear_reference(h.to(dtype), whole.to(dtype), *others)  # type: ignore[arg-type]
    stored, scale = (weight.values, weight.scale) if isinstance(weight, Int8Weight) else (weight, None)
    result: Tensor = autograd.ModulatedLinear.apply(h.to(dtype), stored, scale, A, B, mod, bias)
    return result


# Weight deltas ---------------------------------------------------------------------------------------


def compute_weight_delta(A: Tensor, B: Tensor, mod: Tensor, token_idx: TokenIndex) -> Tensor:
    """A diag(mod) B of a token, materialized and differentiable.

    mod [..., S, r]. An int picks along S and gives [..., d, f]. A tuple of ints picks by every leading
    dimension of mod: (b, s) gives [d, f].
    """
    common.check_floating(A=A, B=B, mod=mod)
    _check_factors(A, B, mod)
    lead = mod.dim() - 1
    index = token_idx if isinstance(token_idx, tuple) else (token_idx,)
    if len(index) != lead and (isinstance(token_idx, tuple) or lead == 0):
        raise ArgumentError(
            f"token_idx={token_idx!r} is not valid for mod {list(mod.shape)}; give {counted(lead, 'number')} "
            "in a tuple, or an int for its last dimension but one"
        )
    for number, size in zip(index, mod.shape[lead - len(index) :], strict=False):
        if isinstance(number, bool) or not isinstance(number, int) or not -size <= number < size:
            raise ArgumentError(f"token_idx {number!r} is not valid; the tokens are 0 to {size - 1}")
    wide = torch.promote_types(torch.promote_types(A.dtype, B.dtype), mod.dtype)
    with common.no_autocast(mod):
        chosen = mod[(..., *index, slice(None))].to(wide)  # type: ignore[index]
        return (A.to(wide) * chosen.unsqueeze(-2)) @ B.to(wide)


def weight_delta_norm(A: Tensor, B: Tensor, mod: Tensor, *, squared: bool = False) -> Tensor:
    """The Frobenius norm of A diag(mod) B per token, [...] for mod [..., r], without the delta.

    ||A diag(m) B||^2 = m^T ((A^T A) * (B B^T)) m, in float32 (float64 where an input is float64). Where the
    norm is zero, as at the start of training with B = 0, its gradient is defined as zero.
    """
    common.check_flags(squared=squared)
    common.check_floating(A=A, B=B, mod=mod)
    _check_factors(A, B, mod)
    wide = torch.float64 if torch.float64 in (A.dtype, B.dtype, mod.dtype) else torch.float32
    with common.no_autocast(mod):
        A, B, mod = A.to(wide), B.to(wide), mod.to(wide)
        gram_rr = (A.t() @ A) * (B @ B.t())
        # Never negative but for rounding.
        square = ((mod @ gram_rr) * mod).sum(dim=-1).clamp(min=0)
        if squared:
            return square
        zero = square <= 0  # false for NaN, which stays NaN
        return square.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


# Checks ----------------------------------------------------------------------------------------------


def _check_factors(A: Tensor, B: Tensor, mod: Tensor) -> None:
    """A [d, r], B [r, f], mod [..., r] on one device."""
    fits = A.dim() == 2 and B.dim() == 2 and mod.dim() >= 1
    rank = A.shape[1] if fits else 0
    if not fits or rank == 0 or B.shape[0] != rank or mod.shape[-1] != rank:
        raise ArgumentError(
            f"A {list(A.shape)}, B {list(B.shape)} and mod {list(mod.shape)} do not fit together; "
            "valid: A [d, r], B [r, f], mod [..., r] with r >= 1"
        )
    common.check_same_device(A=A, B=B, mod=mod)


def _check_arguments(
    h: Tensor, *, weight: Tensor | Int8Weight, A: Tensor, B: Tensor, mod: Tensor, bias: Tensor | None
) -> None:
    common.check_floating(h=h, A=A, B=B, mod=mod)
    common.check_floating_if_given(bias=bias)
    stored = weight.values if isinstance(weight, Int8Weight) else weight
    if stored is weight and getattr(weight, "dtype", None) not in common.FLOATS:
        given = f"has dtype {weight.dtype}" if isinstance(weight, Tensor) else f"is a {type(weight).__name__}"
        valid = "a float tensor [d, f], or an Int8Weight (quantize_int8(weight))"
        raise ArgumentError(f"weight {given}; valid: {valid}")
    _check_factors(A, B, mod)
    d, f = A.shape[0], B.shape[1]
    if h.dim() < 1 or h.shape[-1] != d or tuple(weight.shape) != (d, f):
        raise ArgumentError(
            f"h {list(h.shape)}, weight {list(weight.shape)}, A {list(A.shape)} and B {list(B.shape)} do not "
            "fit together; valid: h [..., d], weight [d, f], A [d, r], B [r, f] (an nn.Linear's weight is "
            "[f, d]: give linear.weight.t())"
        )
    if bias is not None and tuple(bias.shape) != (f,):
        raise ArgumentError(f"bias has shape {list(bias.shape)}; valid: [{f}]")
    sizes = zip(reversed(mod.shape[:-1]), reversed(h.shape[:-1]), strict=False)
    if mod.dim() > h.dim() or not all(size in (1, wanted) for size, wanted in sizes):
        raise ArgumentError(
            f"mod {list(mod.shape)} does not broadcast to the tokens of h {list(h.shape)}; valid: leading "
            "dimensions like h's, or 1, or none"
        )
    common.check_same_device(h=h, weight=stored, A=A, B=B, mod=mod, bias=bias)
