"""The one autograd function: what is kept for backward, and which gradients are made.

Legend: N tokens, d in, f out, r the rank; L the leading shape of h, whose product is N.
    a = h A        t = a * mod       y = h W + t B + bias
    u = g B^T      dB = t^T g        dmod = u * a      da = u * mod
    dA = h^T da    dh = g W^T + da A^T     dW = h^T g        dbias = sum of g over tokens

Kept: of the inputs those that a wanted gradient needs, and a [N, r] where B or mod is trained. It is kept,
not made again, because it is r / d of h and making it again would read all of h.

The low-rank part is written first, and the large product adds to it as it is written: 1.11 times the bare
product's time, forward and backward on an H200 (N 65536, d 4096, f 14336, r 16), where adding the low-rank
part to the finished product, which reads and writes that once more, takes 1.16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_autocast, refuse_second_derivatives
from oomph.ops.modulation import weights

# g_Nf, p_fr or None, t_Nr or None -> g p (which may be float32) and g^T t.
PullBack = Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]


class ModulatedLinear(torch.autograd.Function):
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
        pull_back: PullBack,
    ) -> Tensor:
        want_h, want_weight, _, want_A, want_B, want_mod, _, _ = ctx.needs_input_grad
        dtype, lead, features = h.dtype, h.shape[:-1], B.shape[1]
        h_Nd = _as_rows(h)
        with no_autocast(h):
            a_Nr = h_Nd @ A.to(dtype)
            t_Nr = _modulated(a_Nr, mod, lead, dtype)
            y_Nf = t_Nr @ B.to(dtype) if bias is None else torch.addmm(bias.to(dtype), t_Nr, B.to(dtype))
            weights.add_times_weight(y_Nf, h_Nd, weight, scale)

        want_u = want_h or want_A or want_mod
        ctx.save_for_backward(
            h if want_A or want_weight else None,
            weight if want_h or want_weight else None,
            scale if want_h else None,
            A if want_h or want_A else None,
            B if want_u or want_B else None,
            mod if want_h or want_A or want_B or want_mod else None,
            a_Nr if want_B or want_mod else None,
        )
        ctx.pull_back, ctx.lead = pull_back, lead
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y_Nf.view(*lead, features)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("modulated_linear")
        want_h, want_weight, _, want_A, want_B, want_mod, want_bias, _ = ctx.needs_input_grad
        h, weight, scale, A, B, mod, a_Nr = ctx.saved_tensors
        lead, dtype = ctx.lead, g.dtype
        g_Nf = _as_matrix(g)
        h_Nd: Any = None if h is None else _as_rows(h)
        grad_h = grad_weight = grad_A = grad_B = grad_mod = grad_bias = None
        with no_autocast(g):
            want_u = want_h or want_A or want_mod
            t_Nr = _modulated(a_Nr, mod, lead, dtype) if want_B else None
            u_Nr, grad_fr = ctx.pull_back(g_Nf, B.to(dtype).t() if want_u else None, t_Nr)
            del t_Nr
            if want_B:
                grad_B = grad_fr.t().to(B.dtype).contiguous()
            if want_mod:
                grad_mod = _modulation_gradient(u_Nr, a_Nr, mod, lead)
            if want_h or want_A:
                da_Nr = _modulated(u_Nr, mod, lead, dtype)
            if want_A:
                grad_A = (h_Nd.t() @ da_Nr).to(A.dtype)
            del u_Nr, grad_fr
            # Last, because these are large: the partial sums above have had the room before them.
            if want_h:
                grad_Nd = da_Nr @ A.to(dtype).t()
                weights.add_times_weight_transposed(grad_Nd, g_Nf, weight, scale)
                grad_h = grad_Nd.view(*lead, A.shape[0])
            if want_weight:
                grad_weight = weights.weight_gradient(h_Nd, g_Nf, weight)
            if want_bias:
                grad_bias = g_Nf.sum(dim=0).to(ctx.bias_dtype)
        return grad_h, grad_weight, None, grad_A, grad_B, grad_mod, grad_bias, None


def _modulated(x_Nr: Tensor, mod: Tensor, lead: torch.Size, dtype: torch.dtype) -> Tensor:
    """x * mod in `dtype`, multiplied in the wider of theirs and rounded once; mod broadcasts."""
    result_Nr = x_Nr.new_empty(x_Nr.shape, dtype=dtype)
    shape = (*lead, x_Nr.shape[1])
    torch.mul(x_Nr.view(shape), mod, out=result_Nr.view(shape))
    return result_Nr


def _modulation_gradient(u_Nr: Tensor, a_Nr: Tensor, mod: Tensor, lead: torch.Size) -> Tensor:
    wide = torch.promote_types(torch.promote_types(u_Nr.dtype, mod.dtype), torch.float32)
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
