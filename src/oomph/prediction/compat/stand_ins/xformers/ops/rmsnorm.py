"""facebookresearch/xformers, xformers/ops/rmsnorm.py: a Triton kernel without a backward pass."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from oomph.prediction.compat import stand_ins

_kernel = partial(stand_ins.kernel, "xformers")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        raise ValueError("Gradients not supported.")
    out = torch.empty_like(x)
    _kernel((x, weight, out))
    return out


class RMSNorm(nn.Module):
    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if include_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
