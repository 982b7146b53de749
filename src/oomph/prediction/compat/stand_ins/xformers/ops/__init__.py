"""facebookresearch/xformers, xformers/ops/__init__.py."""

from .fmha import (
    AttentionBias,
    LowerTriangularMask,
    MemoryEfficientAttentionCutlassFwdFlashBwOp,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    memory_efficient_attention,
    memory_efficient_attention_forward,
)
from .indexing import index_select_cat, scaled_index_add
from .rmsnorm import RMSNorm
from .swiglu_op import SwiGLU, swiglu
from .unbind import stack_or_none, unbind

AttentionMask = AttentionBias
AttentionOp = AttentionOpBase = tuple

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "AttentionOp",
    "AttentionOpBase",
    "LowerTriangularMask",
    "MemoryEfficientAttentionCutlassFwdFlashBwOp",
    "MemoryEfficientAttentionCutlassOp",
    "MemoryEfficientAttentionFlashAttentionOp",
    "RMSNorm",
    "SwiGLU",
    "index_select_cat",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "scaled_index_add",
    "stack_or_none",
    "swiglu",
    "unbind",
]
