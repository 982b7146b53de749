"""The public functions, and the autograd function behind modulated_linear.

Every token t has its own weight, W + A diag(mod_t) B. Since h (A diag(m) B) = ((h A) * m) B, the weights of
tokens are never computed.
"""

from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import OpFunction, no_autocast, refuse_second_derivatives
from oomph.ops.modulation import weights
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
    result: Tensor = _ModulatedLinear.apply(h.to(dtype), stored, scale, A, B, mod, bias)
    return result


class _ModulatedLinear(OpFunction):
    """Legend: N tokens, d in, f out, r the rank; L the leading shape of h, whose product is N.
        a = h A        t = a * mod       y = h W + t B + bias
        u = g B^T      dB = t^T g        dmod = u * a      da = u * mod
        dA = h^T da    dh = g W^T + da A^T     dW = h^T g        dbias = sum of g over tokens

    Saved: of the inputs those that a needed gradient uses, and a [N, r] where B or mod is trained. It is
    saved, not computed again, because it is r / d of h and computing it again would read all of h.

    The low-rank part is written first, and the large product adds to it as it is written: 1.11 times the
    bare product's time, forward and backward on an H200 (N 65536, d 4096, f 14336, r 16), where adding the
    low-rank part to the finished product, which reads and writes that once more, takes 1.16.
    """

    op = "modulated_linear"

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        scale: Tensor | None,
        A: Tensor,
        B: Tensor,
        mod: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        needs_h, needs_weight, _, needs_A, needs_B, needs_mod, _ = ctx.needs_input_grad
        dtype, lead, features = h.dtype, h.shape[:-1], B.shape[1]
        h_Nd = _as_rows(h)
        with no_autocast(h):
            a_Nr = h_Nd @ A.to(dtype)
            t_Nr = _times_mod(a_Nr, mod, lead, dtype)
            y_Nf = t_Nr @ B.to(dtype) if bias is None else torch.addmm(bias.to(dtype), t_Nr, B.to(dtype))
            weights.add_times_weight(y_Nf, h_Nd, weight, scale)

        needs_u = needs_h or needs_A or needs_mod
        ctx.save_for_backward(
            h if needs_A or needs_weight else None,
            weight if needs_h or needs_weight else None,
            scale if needs_h else None,
            A if needs_h or needs_A else None,
            B if needs_u or needs_B else None,
            mod if needs_h or needs_A or needs_B or needs_mod else None,
            a_Nr if needs_B or needs_mod else None,
        )
        ctx.lead = lead
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y_Nf.view(*lead, features)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("modulated_linear")
        needs_h, needs_weight, _, needs_A, needs_B, needs_mod, needs_bias = ctx.needs_input_grad
        h, weight, scale, A, B, mod, a_Nr = ctx.saved_tensors
        lead, dtype = ctx.lead, g.dtype
        g_Nf = _as_matrix(g)
        h_Nd: Any = None if h is None else _as_rows(h)
        grad_h = grad_weight = grad_A = grad_B = grad_mod = grad_bias = None
        with no_autocast(g):
            t_Nr: Any = _times_mod(a_Nr, mod, lead, dtype) if needs_B else None
            u_Nr: Any = g_Nf @ B.to(dtype).t() if needs_h or needs_A or needs_mod else None
            if needs_B:
                grad_B = (g_Nf.t() @ t_Nr).t().to(B.dtype).contiguous()
            del t_Nr
            if needs_mod:
                grad_mod = _modulation_gradient(u_Nr, a_Nr, mod, lead)
            if needs_h or needs_A:
                da_Nr = _times_mod(u_Nr, mod, lead, dtype)
            if needs_A:
                grad_A = (h_Nd.t() @ da_Nr).to(A.dtype)
            del u_Nr
            if needs_h:
                grad_Nd = da_Nr @ A.to(dtype).t()
                weights.add_times_weight_transposed(grad_Nd, g_Nf, weight, scale)
                grad_h = grad_Nd.view(*lead, A.shape[0])
            if needs_weight:
                grad_weight = weights.weight_gradient(h_Nd, g_Nf, weight)
            if needs_bias:
                grad_bias = g_Nf.sum(dim=0).to(ctx.bias_dtype)
        return grad_h, grad_weight, None, grad_A, grad_B, grad_mod, grad_bias


def _times_mod(x_Nr: Tensor, mod: Tensor, lead: torch.Size, dtype: torch.dtype) -> Tensor:
    """x * mod in `dtype`, multiplied in the wider of theirs and rounded once; mod broadcasts."""
    result_Nr = x_Nr.new_empty(x_Nr.shape, dtype=dtype)
    shape = (*lead, x_Nr.shape[1])
    torch.mul(x_Nr.view(shape), mod, out=result_Nr.view(shape))
    return result_Nr


def _modulation_gradient(u_Nr: Tensor, a_Nr: Tensor, mod: Tensor, lead: torch.Size) -> Tensor:
    wide = common.wide_dtype(torch.promote_types(u_Nr.dtype, mod.dtype))
    product = u_Nr.to(wide) * a_Nr
    return product.view(*lead, a_Nr.shape[1]).sum_to_size(mod.shape).to(mod.dtype)


def _as_rows(x: Tensor) -> Tensor:
    # Not -1, which has no meaning for rows of no numbers.
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _as_matrix(g: Tensor) -> Tensor:
    """g [N, f] with rows that products can read; a sum's gradient is one number seen N x f times."""
    g_Nf = _as_rows(g)
    readable = g_Nf.stride(1) == 1 and g_Nf.stride(0) >= g_Nf.shape[1]
    return g_Nf if readable else g_Nf.contiguous()


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
    wide = common.state_dtype(A, B, mod)
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
    common.check_floating(h=h, A=A, B=B, mod=mod, **common.not_none(bias=bias))
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
    common.check_shape([f], bias=bias)
    sizes = zip(reversed(mod.shape[:-1]), reversed(h.shape[:-1]), strict=False)
    if mod.dim() > h.dim() or not all(size in (1, wanted) for size, wanted in sizes):
        raise ArgumentError(
            f"mod {list(mod.shape)} does not broadcast to the tokens of h {list(h.shape)}; valid: leading "
            "dimensions like h's, or 1, or none"
        )
    common.check_same_device(h=h, weight=stored, A=A, B=B, mod=mod, bias=bias)
