"""Dao-AILab/flash-attention, flash_attn/modules/mlp.py: plain PyTorch but for SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.activations import swiglu


class Mlp(nn.Module):
    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden, out = hidden_features or in_features * 4, out_features or in_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):
    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden = hidden_features or int(8 * in_features / 3)
        hidden = -(-hidden // multiple_of) * multiple_of
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Any:
        y = self.fc1(x)
        if self.activation is F.sigmoid:
            y = F.glu(y, dim=-1)
        else:
            y, gate = y.chunk(2, dim=-1)
            y = swiglu(gate, y) if self.activation is F.silu else y * self.activation(gate)
        y = self.fc2(y)
        return (y, x) if self.return_residual else y
