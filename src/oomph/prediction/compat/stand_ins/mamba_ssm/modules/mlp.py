"""state-spaces/mamba, mamba_ssm/modules/mlp.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class GatedMLP(nn.Module):
    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        bias: bool = False,
        multiple_of: int = 128,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden = hidden_features if hidden_features is not None else int(8 * in_features / 3)
        hidden = -(-hidden // multiple_of) * multiple_of
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, out_features or in_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.fc1(x).chunk(2, dim=-1)
        out: Tensor = self.fc2(y * self.activation(gate))
        return out
