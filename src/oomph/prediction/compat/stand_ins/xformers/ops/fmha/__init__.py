"""facebookresearch/xformers, xformers/ops/fmha: torch's own kernels, flash first, then CUTLASS (flash.py and
cutlass.py there; from 0.0.34 on xformers builds none).

Tensors are [batch, L, heads, head size], [batch, L, head size] or, with groups, [batch, L, groups, heads,
head size]. The memory of flash attention is that of flash_attn's function, that of CUTLASS torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oomph.prediction.compat import stand_ins
from oomph.prediction.compat.stand_ins.flash_attn import flash_attn_interface as flash

from . import attn_bias
from .attn_bias import (
    AttentionBias,
    BlockDiagonalCausalMask,
    BlockDiagonalMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
)


class _Op:
    """One of the two, as programs choose it: (forward, backward)."""

    def __init__(self, name: str) -> None:
        self.NAME = name


_FLASH, _CUTLASS = _Op("fa2"), _Op("cutlass")
MemoryEfficientAttentionFlashAttentionOp = (_FLASH, _FLASH)
MemoryEfficientAttentionCutlassOp = (_CUTLASS, _CUTLASS)
MemoryEfficientAttentionCutlassFwdFlashBwOp = (_CUTLASS, _FLASH)
_HALF = (torch.float16, torch.bfloat16)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    if len({each.dtype for each in (query, key, value)}) > 1:
        raise ValueError(
            f"Query/Key/Value should all have the same dtype: query.dtype: {query.dtype} key.dtype  : "
            f"{key.dtype} value.dtype: {value.dtype}"
        )
    shape = *query.shape[:-1], value.shape[-1]
    query, key, value = map(_with_heads, (query, key, value))
    reason = "op" if op is not None and op[0] is _CUTLASS else _flash_objection(query, key, value, attn_bias)
    if reason is None:
        out = _flash(query, key, value, attn_bias, p, scale)
    elif op is not None and op[0] is _FLASH:
        raise ValueError(f"Operator `memory_efficient_attention` does not support inputs: `fa2F`: {reason}")
    else:
        out = _cutlass(query, key, value, attn_bias, p, scale)
    return out.reshape(shape)


memory_efficient_attention_forward = memory_efficient_attention


def _with_heads(tensor: Tensor) -> Tensor:
    if tensor.dim() == 3:
        return tensor.unsqueeze(2)
    return tensor.flatten(2, 3) if tensor.dim() == 5 and tensor.stride(3) else _ungrouped(tensor)


def _ungrouped(tensor: Tensor) -> Tensor:
    """Keys and values that are expanded over the heads of a group: one of each."""
    return tensor[:, :, :, 0] if tensor.dim() == 5 else tensor


def _flash_objection(query: Tensor, key: Tensor, value: Tensor, bias: Any) -> str | None:
    head = query.shape[-1]
    checks = (
        (stand_ins.gpu("xformers").capability >= (8, 0), "requires device with capability >= (8, 0)"),
        (query.dtype in _HALF, f"dtype={query.dtype} (supported: float16, bfloat16)"),
        (head <= 256 and value.shape[-1] == head, f"head sizes {head} and {value.shape[-1]}"),
        (head % 8 == 0, "query.shape[-1] % 8 != 0"),
        (not isinstance(bias, (Tensor, LowerTriangularMaskWithTensorBias)), f"attn_bias is {type(bias)}"),
        (all(each.stride(-1) == 1 for each in (query, key, value)), "last dimension is not contiguous"),
        (type(bias) is not LowerTriangularMask or query.shape[1] <= key.shape[1], "bottom-right mask"),
    )
    return next((reason for holds, reason in checks if not holds), None)


def _flash(query: Tensor, key: Tensor, value: Tensor, bias: Any, p: float, scale: float | None) -> Tensor:
    causal = isinstance(bias, AttentionBias) and bias.causal
    window = bias.window if isinstance(bias, AttentionBias) else (-1, -1)
    options: dict[str, Any] = {"softmax_scale": scale, "causal": causal, "window_size": window}
    stand_ins.kernel("xformers", ())
    if not isinstance(bias, BlockDiagonalMask):
        out: Tensor = flash.flash_attn_func(query, key, value, p, package="xformers", **options)
        return out
    rows = (each.flatten(0, 1) for each in (query, key, value))
    lengths = bias.q_seqinfo, bias.k_seqinfo
    starts = [each.to(query.device).seqstart for each in lengths]
    longest = [each.max_seqlen for each in lengths]
    packed: Tensor = flash.flash_attn_varlen_func(*rows, *starts, *longest, p, package="xformers", **options)
    return packed


def _cutlass(query: Tensor, key: Tensor, value: Tensor, bias: Any, p: float, scale: float | None) -> Tensor:
    stand_ins.kernel("xformers", (query, key, value))
    causal = isinstance(bias, AttentionBias) and bias.causal
    mask = bias if isinstance(bias, Tensor) else getattr(bias, "_bias", None)
    if mask is not None and mask.dim() == 3:  # of batch and heads together
        mask = mask.unflatten(0, (query.shape[0], -1))
    heads = query.shape[2] // key.shape[2]
    parts = [query, *(each.repeat_interleave(heads, 2) if heads > 1 else each for each in (key, value))]
    query, key, value = (each.transpose(1, 2) for each in parts)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(
            query, key, value, mask, p, is_causal=causal and mask is None, scale=scale
        )
    return out.transpose(1, 2)


__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "attn_bias",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
]
