"""The recurrence of Kimi Delta Attention token by token: the specification of `kda`.

Differentiable torch in the dtype of the inputs, also twice. It is what generation runs, one token from a
state. Autograd saves every token's state [dk, dv] per head, so training on long sequences uses chunks.
"""

import torch
from torch import Tensor


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, dv], final state [B, H, dk, dv]).

    q, k, log_alpha [B, T, H, dk], v [B, T, H, dv], beta [B, T, H], initial_state [B, H, dk, dv].
    """
    batch, _, heads, dk = k.shape
    scale = dk**-0.5 if scale is None else scale
    state = v.new_zeros(batch, heads, dk, v.shape[3]) if initial_state is None else initial_state
    # Per token, columns [B, H, dk, 1] and rows [B, H, 1, dv]. unbind, because the gradient of T separate
    # slices would be a sum of T tensors of the full size.
    columns = (x.unsqueeze(-1).unbind(1) for x in (q * scale, k, log_alpha.exp()))
    rows, betas = v.unsqueeze(-2).unbind(1), beta[..., None, None].unbind(1)
    outputs = []
    for q_t, k_t, alpha_t, v_t, beta_t in zip(*columns, rows, betas, strict=True):
        state = alpha_t * state  # each key channel decays by its own factor
        error = v_t - k_t.mT @ state  # of the value that the state returns for this key
        state = state + k_t * (beta_t * error)
        outputs.append(q_t.mT @ state)
    o = torch.cat(outputs, 2).transpose(1, 2) if outputs else v.new_zeros(v.shape)
    return o, state
