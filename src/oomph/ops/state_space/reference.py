"""The spec: one token after another, plain differentiable torch.

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t x_t        y_t = C_t . h_t + D x_t

"backward" visits the tokens from the last to the first. "both" adds up one scan of each kind.
"""

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
    *,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    direction: str = "forward",
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Shapes as in oomph.ops.selective_scan, all of one dtype -> y and the final state."""
    if direction == "both":
        one_x = x.dim() == 3
        pairs = [
            _one_way(
                x if one_x else x[way],
                delta[way],
                A[way],
                B[way],
                C[way],
                None if D is None else D[way],
                None if delta_bias is None else delta_bias[way],
                delta_softplus,
                None if initial_state is None else initial_state[way],
                to_the_left=way == 1,
            )
            for way in (0, 1)
        ]
        y, state = pairs[0][0] + pairs[1][0], torch.stack([pairs[0][1], pairs[1][1]])
    else:
        left = direction == "backward"
        y, state = _one_way(x, delta, A, B, C, D, delta_bias, delta_softplus, initial_state, to_the_left=left)
    return (y if z is None else y * F.silu(z)), state


def _one_way(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    initial_state: Tensor | None,
    to_the_left: bool,
) -> tuple[Tensor, Tensor]:
    batch, length, d = x.shape
    if delta_bias is not None:
        delta = delta + delta_bias
    if delta_softplus:
        delta = F.softplus(delta)
    h = x.new_zeros(batch, d, A.shape[1]) if initial_state is None else initial_state
    outputs: list[Tensor] = [x.new_zeros(batch, d)] * length
    for t in reversed(range(length)) if to_the_left else range(length):
        decay = torch.exp(delta[:, t, :, None] * A)
        write = (delta[:, t] * x[:, t])[:, :, None] * B[:, t, None, :]
        h = decay * h + write
        outputs[t] = (h * C[:, t, None, :]).sum(dim=-1)
        if D is not None:
            outputs[t] = outputs[t] + D * x[:, t]
    return (torch.stack(outputs, dim=1) if length else x.new_zeros(x.shape)), h
