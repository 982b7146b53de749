"""What kda computes, token by token, to be read. Plain differentiable torch in the inputs' own dtype."""

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k, log_alpha [B, T, H, K], v [B, T, H, V], beta [B, T, H], state [B, H, K, V] -> o, final state."""
    batch, _, heads, key_size = k.shape
    scale = key_size**-0.5 if scale is None else scale
    state = v.new_zeros(batch, heads, key_size, v.shape[3]) if initial_state is None else initial_state
    outputs = []
    # Cut up once: autograd would add up a whole tensor for every slice taken by itself.
    by_token = (x.unbind(1) for x in (q, k, v, log_alpha, beta))
    for q_t, k_t, v_t, log_alpha_t, beta_t in zip(*by_token, strict=True):
        # Every channel of the memory fades by its own factor ...
        faded = torch.exp(log_alpha_t).unsqueeze(-1) * state
        # ... then what the memory answers to this key is moved towards the value, by the share beta.
        answer = torch.einsum("bhk,bhkv->bhv", k_t, faded)
        correction = beta_t.unsqueeze(-1) * (v_t - answer)
        state = faded + torch.einsum("bhk,bhv->bhkv", k_t, correction)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q_t, state))
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)
    return o, state
