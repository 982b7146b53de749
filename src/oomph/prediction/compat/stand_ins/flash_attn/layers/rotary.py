"""Memory: Dao-AILab/flash-attention, flash_attn/layers/rotary.py and flash_attn/ops/triton/rotary.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oomph.prediction.compat import stand_ins

_kernel = partial(stand_ins.kernel, "flash_attn")


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, inplace: bool = False) -> Tensor:
    output = x if inplace else torch.empty_like(x)
    width = cos.shape[-1] * 2
    if width > x.shape[-1]:
        raise AssertionError("rotary_dim must be <= headdim")
    if width < x.shape[-1] and not inplace:
        output[..., width:].copy_(x[..., width:])
    _kernel((x, cos, sin) if inplace else (x, cos, sin, output))
    return output


class ApplyRotaryEmb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inplace = inplace
        return apply_rotary(x, cos, sin, inplace)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return apply_rotary(grad, cos, sin, ctx.inplace), None, None, None


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Any:
    """Of x [batch, L, heads, head size], or [rows, heads, head size] with `cu_seqlens`."""
    return ApplyRotaryEmb.apply(x, cos, sin, inplace)


apply_rotary_emb_func = apply_rotary_emb


class ApplyRotaryEmbPacked_(torch.autograd.Function):
    """In place, on the parts of a packed tensor that `select` returns."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, cos: Tensor, sin: Tensor, select: Any) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.select = select
        apply_rotary(select(packed), cos, sin, inplace=True)
        return packed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        apply_rotary(ctx.select(grad), cos, sin, inplace=True)
        return grad, None, None, None


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Any:
    """Of qkv [batch, L, 3, heads, head size], or [batch, L, all heads, head size] with `num_heads_q`."""

    def select(packed: Tensor) -> Tensor:
        if num_heads_q is None:
            return packed[:, :, :2]
        return packed[:, :, : (packed.shape[2] + num_heads_q) // 2]

    return ApplyRotaryEmbPacked_.apply(qkv, cos, sin, select)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Any:
    return ApplyRotaryEmbPacked_.apply(kv, cos, sin, lambda packed: packed[:, :, 0])


class RotaryEmbedding(nn.Module):
    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("inv_freq", 1.0 / (self.base ** (steps / dim)), persistent=False)
        scale = None if scale_base is None else (steps + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        known = self._cos_cached
        same = known is not None and known.device == device and known.dtype == dtype
        if same and seqlen <= self._seq_len_cached:
            return
        self._seq_len_cached = seqlen
        freqs = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), self.inv_freq)
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = torch.cos(freqs).to(dtype), torch.sin(freqs).to(dtype)
            return
        power = torch.arange(seqlen, dtype=self.scale.dtype, device=self.scale.device) - seqlen // 2
        scale = self.scale ** (power / self.scale_base)[:, None]
        self._cos_cached = (torch.cos(freqs) * scale).to(dtype)
        self._sin_cached = (torch.sin(freqs) * scale).to(dtype)
        self._cos_k_cached = (torch.cos(freqs) / scale).to(dtype)
        self._sin_k_cached = (torch.sin(freqs) / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """In place. qkv [batch, L, 3, heads, head size]; or q and kv [batch, L, 2, heads, head size]."""
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        assert self._cos_cached is not None
        assert self._sin_cached is not None
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, self._cos_cached, self._sin_cached, num_heads_q=num_heads_q)
        q = apply_rotary_emb_func(qkv, self._cos_cached, self._sin_cached, inplace=True)
        return q, apply_rotary_emb_kv_(kv, self._cos_cached, self._sin_cached)
