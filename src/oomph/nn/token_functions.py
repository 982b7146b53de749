"""Functions of tokens that layers share; all but head_norm are meant for `recomputed`.

Legend: B batch, T tokens, H heads, D head size. Computed in float32, or wider.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def head_norm(x_BTHD: Tensor, norm: nn.RMSNorm) -> Tensor:
    """The norm of each head in x's dtype. Where autocast left the weight in another, torch would not fuse."""
    return F.rms_norm(x_BTHD, list(norm.normalized_shape), norm.weight.to(x_BTHD.dtype), norm.eps)


def gated_head_norm(x_BTHD: Tensor, gate_BTHD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of each head, times sigmoid(gate)."""
    x, gate, weight = wide(x_BTHD), wide(gate_BTHD), wide(weight_D)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * scale * weight * torch.sigmoid(gate)).to(gate_BTHD.dtype)
