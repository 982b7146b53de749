"""As layer_norm.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .layer_norm import DropoutAddLayerNorm, dropout_add_layer_norm, layer_norm_fn


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Any:
    return layer_norm_fn(x, weight, None, eps=epsilon)


dropout_add_rms_norm = dropout_add_layer_norm


class DropoutAddRMSNorm(DropoutAddLayerNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.bias
        self.register_parameter("bias", None)


class RMSNorm(DropoutAddRMSNorm):
    def __init__(self, hidden_size: int, eps: float = 1e-5, device: Any = None, dtype: Any = None) -> None:
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return rms_norm(x, self.weight, self.eps)


__all__ = ["DropoutAddRMSNorm", "RMSNorm", "dropout_add_rms_norm", "rms_norm"]
