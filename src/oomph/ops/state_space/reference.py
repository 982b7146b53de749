"""What `selective_scan` computes, one token after another in plain differentiable torch.

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t        y_t = C_t . h_t + D x_t

"backward" scans from the last token to the first. "both" sums one scan of each kind.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    direction: str = "forward",
) -> Tensor:
    """Shapes as in oomph.ops.selective_scan, all of one dtype -> y."""
    if delta_bias is not None:
        delta = delta + delta_bias[..., None, None, :]
    if delta_softplus:
        delta = F.softplus(delta)
    if direction == "both":
        pairs = (x.expand(2, *x.shape[-3:]), delta, A, B, C, D)
        halves: list[list[Any]] = [[None if each is None else each[i] for each in pairs] for i in (0, 1)]
        y = _scan(False, *halves[0]) + _scan(True, *halves[1])
    else:
        y = _scan(direction == "backward", x, delta, A, B, C, D)
    return y if z is None else y * F.silu(z)


def _scan(
    reverse: bool, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> Tensor:
    batch, length, d = x.shape
    h = x.new_zeros(batch, d, A.shape[1])
    outputs: list[Tensor] = [x.new_zeros(batch, d)] * length
    for t in reversed(range(length)) if reverse else range(length):
        decay = torch.exp(delta[:, t, :, None] * A)
        write = (delta[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        h = decay * h + write
        outputs[t] = (h * C[:, t, None, :]).sum(dim=-1)
        if D is not None:
            outputs[t] = outputs[t] + D * x[:, t]
    return torch.stack(outputs, dim=1) if length else x.new_zeros(x.shape)
