"""cuDNN's attention with a mask or bias, made exact for queries that may see no key.

For a row that is -inf throughout, cuDNN returns an average of all values. Here such a row's result becomes
zero and its log-sum-exp +inf: in backward its weights are then exp(score - inf) = 0, and so are all the
gradients it gives, without another tensor of the size of the result.
"""

import math
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_compile, refuse_second_derivatives

aten = torch.ops.aten


@no_compile
def cudnn_with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + bias) v. The bias has 4 dimensions, 1 or full, q's dtype and no gradient."""
    out: Tensor = _CudnnAttention.apply(q, k, v, bias, scale)  # type: ignore[no-untyped-call]
    return out


class _CudnnAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        needs_backward = any(ctx.needs_input_grad)
        results = aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, needs_backward, 0.0, False, False, scale=scale
        )
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = results
        without_key = bias.amax(-1, keepdim=True) == -math.inf
        out.masked_fill_(without_key, 0.0)
        if needs_backward:
            lse.view(*q.shape[:3], 1).masked_fill_(without_key, math.inf)
            ctx.save_for_backward(q, k, v, bias, out, lse, cum_q, cum_k, seed, offset)
            ctx.rest = (max_q, max_k, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention")
        q, k, v, bias, out, lse, cum_q, cum_k, seed, offset = ctx.saved_tensors
        max_q, max_k, scale = ctx.rest
        rest = (lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, 0.0, False)
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, *rest, scale=scale
        )
        wanted = [g if want else None for g, want in zip(gradients, ctx.needs_input_grad[:3], strict=True)]
        return *wanted, None, None
