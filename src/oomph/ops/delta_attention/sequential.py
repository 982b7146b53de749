"""Token by token: what generation needs, one token from a state; and a way to derive twice.

Autograd keeps every token's state, K x V per head: for long sequences with gradients there is "chunked".
"""

import torch
from torch import Tensor


def sequential(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, V] in v's dtype, the final state). All arithmetic is in the state's dtype."""
    q, k, v, log_alpha, beta = (x.to(state.dtype) for x in inputs)
    # Each token's rows as columns of a matrix; cut up at once, or backward would add up T whole tensors.
    columns = (x.unsqueeze(-1).unbind(1) for x in (q * scale, k, log_alpha.exp()))
    outputs = []
    for q_t, k_t, alpha_t, v_t, beta_t in zip(
        *columns, v.unsqueeze(-2).unbind(1), beta[..., None, None].unbind(1), strict=True
    ):
        state = state * alpha_t
        state = state + k_t * ((v_t - k_t.transpose(2, 3) @ state) * beta_t)
        outputs.append(q_t.transpose(2, 3) @ state)
    return torch.cat(outputs, 2).transpose(1, 2).to(inputs[2].dtype), state
