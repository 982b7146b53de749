"""An extension of its own in Dao-AILab/flash-attention, csrc/layer_norm: as the Triton op beside this file.

The mask of dropout is not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .triton.layer_norm import layer_norm_fn


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Any:
    return layer_norm_fn(x, weight, bias, eps=epsilon)


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    return layer_norm_fn(
        x0,
        weight,
        bias,
        residual,
        eps=epsilon,
        dropout_p=dropout_p,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        return_dropout_mask=return_dropout_mask,
    )


class DropoutAddLayerNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.prenorm, self.p, self.eps, self.residual_in_fp32 = prenorm, p, eps, residual_in_fp32
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        return dropout_add_layer_norm(
            x0,
            residual,
            self.weight,
            self.bias,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
        )
