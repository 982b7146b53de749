"""state-spaces/mamba, mamba_ssm/modules/block.py: sum, norm and mixer; the sum is handed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.triton.layer_norm import RMSNorm, layer_norm_fn


class Block(nn.Module):
    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module] = nn.Identity,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32, self.fused_add_norm = residual_in_fp32, fused_add_norm
        self.norm, self.mixer = norm_cls(dim), mixer_cls(dim)
        self.mlp: nn.Module | None = None
        if mlp_cls is not nn.Identity:
            self.norm2, self.mlp = norm_cls(dim), mlp_cls(dim)

    def _normed(self, norm: Any, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.fused_add_norm:
            out: tuple[Tensor, Tensor] = layer_norm_fn(
                hidden,
                norm.weight,
                norm.bias,
                residual=residual,
                prenorm=True,
                residual_in_fp32=self.residual_in_fp32,
                eps=norm.eps,
                is_rms_norm=isinstance(norm, RMSNorm),
            )
            return out
        residual = hidden if residual is None else hidden + residual
        normed = norm(residual.to(dtype=norm.weight.dtype))
        return normed, residual.to(torch.float32) if self.residual_in_fp32 else residual

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        inference_params: Any = None,
        **mixer_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        hidden_states, residual = self._normed(self.norm, hidden_states, residual)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = self._normed(self.norm2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual
