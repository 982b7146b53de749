"""The fused LayerNorm of flash_attn, of which mamba_ssm has a copy.

Memory: Dao-AILab/flash-attention, flash_attn/ops/triton/layer_norm.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _rows(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class LayerNormFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        dropout_p: float,
        prenorm: bool,
        residual_in_fp32: bool,
        is_rms_norm: bool,
        out_dtype: torch.dtype | None,
        rows_of_sums: int,
        kernel: Any,
    ) -> Any:
        shape = x.shape
        rows, sums = _rows(x), _rows(residual)
        assert rows is not None
        weight = weight.contiguous()
        out = torch.empty_like(rows, dtype=out_dtype or rows.dtype)
        sum_dtype = torch.float32 if residual_in_fp32 else rows.dtype
        sum_dtype = sum_dtype if sums is None else sums.dtype
        stored = rows  # what is normalised
        if sums is not None or sum_dtype != rows.dtype or dropout_p > 0:
            stored = rows.new_empty(rows.shape, dtype=sum_dtype)
        mean = None if is_rms_norm else rows.new_empty(rows.shape[0], dtype=torch.float32)
        scale = rows.new_empty(rows.shape[0], dtype=torch.float32)
        seeds = None
        if dropout_p > 0:
            seeds = torch.randint(2**32, (rows.shape[0],), device=rows.device, dtype=torch.int64)
        kernel(
            (rows, sums, weight, bias, out, stored, mean, scale, seeds),
            tuned_for=("layer norm", rows.shape[1], sums is None, stored is rows, is_rms_norm),
        )
        ctx.save_for_backward(stored, weight, bias, seeds, mean, scale)
        ctx.shape, ctx.dropout_p, ctx.prenorm, ctx.kernel = shape, dropout_p, prenorm, kernel
        ctx.has_residual, ctx.dtype, ctx.rows_of_sums = residual is not None, x.dtype, rows_of_sums
        out = out.reshape(shape)
        return (out, stored.reshape(shape)) if prenorm else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *others: Any) -> Any:
        stored, weight, bias, _, mean, scale = ctx.saved_tensors
        grad_rows = _rows(grad_out)
        grad_stored = _rows(others[0]) if ctx.prenorm else None
        grad = stored.new_empty(stored.shape, dtype=ctx.dtype)
        separate = ctx.has_residual and (ctx.dtype != stored.dtype or ctx.dropout_p > 0)
        grad_residual = torch.empty_like(stored) if separate else grad
        partial_sums = [
            each.new_empty(ctx.rows_of_sums, each.shape[0], dtype=torch.float32)
            for each in (weight, bias)
            if each is not None
        ]
        ctx.kernel(
            (stored, weight, grad_rows, grad_stored, grad, grad_residual, mean, scale, *partial_sums),
            tuned_for=("layer norm backward", stored.shape[1], ctx.prenorm, separate, mean is None),
        )
        sums = [each.sum(0).to(weight.dtype) for each in partial_sums]
        return (
            grad.reshape(ctx.shape),
            sums[0],
            sums[1] if bias is not None else None,
            grad_residual.reshape(ctx.shape) if ctx.has_residual else None,
            *([None] * 7),
        )
