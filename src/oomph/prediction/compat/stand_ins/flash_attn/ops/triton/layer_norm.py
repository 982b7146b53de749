"""See fused_norm.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oomph.prediction.compat import stand_ins
from oomph.prediction.compat.stand_ins.fused_norm import LayerNormFn

_kernel = partial(stand_ins.kernel, "flash_attn")


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """The norm of x + residual, and that sum where `prenorm`."""
    if x1 is not None or weight1 is not None or return_dropout_mask:
        raise NotImplementedError(
            "oomph's stand-in for the fused LayerNorm has no x1, weight1 and return_dropout_mask"
        )
    return LayerNormFn.apply(
        x,
        weight,
        bias,
        residual,
        dropout_p,
        prenorm,
        residual_in_fp32,
        is_rms_norm,
        out_dtype,
        8 * stand_ins.gpu("flash_attn").multiprocessors,
        _kernel,
    )


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    return layer_norm_fn(x, weight, bias, *args, **{**kwargs, "is_rms_norm": True})


class RMSNorm(nn.Module):
    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.eps, self.drop = eps, nn.Dropout(dropout_p) if dropout_p > 0 else None
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Any:
        return rms_norm_fn(
            x,
            self.weight,
            self.bias,
            residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )
