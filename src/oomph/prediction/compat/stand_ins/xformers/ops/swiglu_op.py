"""Memory: facebookresearch/xformers, xformers/ops/swiglu_op.py: the op of plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .unbind import unbind


def swiglu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    w3: Tensor,
    b3: Tensor | None,
    *,
    op: Any = None,
) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)


class SwiGLU(nn.Module):
    w12: nn.Linear | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.in_features, self.hidden_features = in_features, hidden_features
        self.out_features, self.op = out_features or in_features, None
        if _pack_weights:
            self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        else:
            self.w12 = None
            self.w1 = nn.Linear(in_features, hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, self.out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        b1: Tensor | None
        b2: Tensor | None
        if self.w12 is None:
            w1, b1, w2, b2 = self.w1.weight, self.w1.bias, self.w2.weight, self.w2.bias
        else:
            w1, w2 = unbind(self.w12.weight.unflatten(0, (2, -1)), 0)
            b1 = b2 = None
            if self.w12.bias is not None:
                b1, b2 = unbind(self.w12.bias.unflatten(0, (2, -1)), 0)
        return swiglu(x, w1, b1, w2, b2, self.w3.weight, self.w3.bias)
