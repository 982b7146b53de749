"""The autograd function.

Legend: N tokens, d in, f out, r the rank; L the leading shape of h, whose product is N.
    a = h A        t = a * mod       y = h W + t B + bias
    u = g B^T      dB = t^T g        dmod = u * a      da = u * mod
    dA = h^T da    dh = g W^T + da A^T     dW = h^T g        dbias = sum of g over tokens

Saved: of the inputs those that a needed gradient uses, and a [N, r] where B or mod is trained. It is saved,
not computed again, because it is r / d of h and computing it again would read all of h.

The low-rank part is written first, and the large product adds to it as it is written: 1.11 times the bare
product's time, forward and backward on an H200 (N 65536, d 4096, f 14336, r 16), where adding the low-rank
part to the finished product, which reads and writes that once more, takes 1.16.
"""

from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import OpFunction, no_autocast, refuse_second_derivatives
from oomph.ops.modulation import weights


class ModulatedLinear(OpFunction):
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
