"""Dao-AILab/flash-attention, flash_attn/modules/mha.py, as it trains: without caches of generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ..layers.rotary import RotaryEmbedding


class _FlashAttention(nn.Module):
    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal, self.softmax_scale, self.drop = causal, softmax_scale, nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size, self.deterministic = window_size, deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "alibi_slopes": self.alibi_slopes,
            "window_size": self.window_size,
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Any:
        """Of qkv [batch, L, 3, heads, head size], or [rows, 3, heads, head size] with `cu_seqlens`."""
        assert qkv.dtype in (torch.float16, torch.bfloat16)
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **options)
        assert max_seqlen is not None
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **options)


class FlashCrossAttention(_FlashAttention):
    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Any:
        assert q.dtype in (torch.float16, torch.bfloat16)
        options = self._options(causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **options)
        assert cu_seqlens_k is not None
        assert max_seqlen is not None
        assert max_seqlen_k is not None
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **options
        )


class MHA(nn.Module):
    """Self-attention with as many keys and values as `num_heads_kv`, or as queries."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if cross_attn or dwconv or use_alibi or not use_flash_attn:
            raise NotImplementedError(
                "oomph's stand-in for flash_attn's MHA has self-attention with use_flash_attn=True, without "
                "dwconv and use_alibi"
            )
        self.num_heads, self.num_heads_kv = num_heads, num_heads_kv or num_heads
        self.head_dim, self.rotary_emb_dim = embed_dim // num_heads, rotary_emb_dim
        self.return_residual, self.checkpointing, self.layer_idx = return_residual, checkpointing, layer_idx
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        width = self.head_dim * (num_heads + 2 * self.num_heads_kv)
        self.Wqkv = nn.Linear(embed_dim, width, bias=qkv_proj_bias, device=device, dtype=dtype)
        self.inner_attn = FlashSelfAttention(causal, softmax_scale, dropout, window_size)
        self.inner_cross_attn = FlashCrossAttention(causal, softmax_scale, dropout, window_size)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Tensor | None = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        packed = self.Wqkv(x)
        lengths = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        if self.num_heads_kv == self.num_heads:
            qkv = packed.unflatten(-1, (3, self.num_heads, self.head_dim))
            if self.rotary_emb_dim > 0:
                qkv = self.rotary_emb(qkv, max_seqlen=max_seqlen)
            out = self._attend(self.inner_attn, qkv, **lengths)
        else:
            heads = packed.unflatten(-1, (self.num_heads + 2 * self.num_heads_kv, self.head_dim))
            if self.rotary_emb_dim > 0:
                heads = self.rotary_emb(heads, max_seqlen=max_seqlen, num_heads_q=self.num_heads)
            q, kv = heads[..., : self.num_heads, :], heads[..., self.num_heads :, :]
            kv = kv.unflatten(-2, (2, self.num_heads_kv))
            if lengths:
                lengths.update(cu_seqlens_k=cu_seqlens, max_seqlen_k=max_seqlen)
            out = self._attend(self.inner_cross_attn, q, kv, **lengths)
        out = self.out_proj(out.flatten(-2))
        return (out, x) if self.return_residual else out

    def _attend(self, attention: nn.Module, *packed: Tensor, **lengths: Any) -> Tensor:
        if self.checkpointing:
            out: Tensor = torch.utils.checkpoint.checkpoint(attention, *packed, use_reentrant=True, **lengths)  # type: ignore[assignment]
            return out
        called: Tensor = attention(*packed, **lengths)
        return called
