"""Field report 000's form of Kimi Delta Attention: an associative scan over dense transitions.

S_t = transitions_t S_{t-1} + writes_t, with transitions [B, T, H, dk, dk] and writes [B, T, H, dk, dv]: dk
times the size of the inputs, and autograd saves the intermediate products as well. It exists to show this
cost, so predictions name its lines; mode="chunked" computes the same function.
"""

import torch
from torch import Tensor

from oomph.ops.common import state_dtype


def dense_updates(
    k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, size: int | None
) -> tuple[Tensor, Tensor]:
    """(transitions, writes), `size` tokens at a time."""
    inputs = (k, v, log_alpha, beta)
    dtype = state_dtype(*inputs)
    step = max(1, k.shape[1]) if size is None else size
    transitions, writes = [], []
    for start in range(0, max(1, k.shape[1]), step):
        part = slice(start, start + step)
        k_part, v_part, log_part, beta_part = (x[:, part].to(dtype) for x in inputs)
        alpha, beta_part = log_part.exp(), beta_part[..., None, None]
        decay_diag = torch.diag_embed(alpha)
        forget_rank1 = beta_part * k_part.unsqueeze(-1) * (alpha * k_part).unsqueeze(-2)
        transitions.append(decay_diag - forget_rank1)
        del decay_diag, forget_rank1
        writes.append(beta_part * k_part.unsqueeze(-1) * v_part.unsqueeze(-2))
    if len(transitions) == 1:
        return transitions[0], writes[0]
    return torch.cat(transitions, 1), torch.cat(writes, 1)


def dense_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    scale: float,
    memory_chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """(o, final state), as `kda_reference`, computed in the dtype of the state."""
    transitions, writes = dense_updates(k, v, log_alpha, beta, memory_chunk_size)
    # The first write includes what the initial state becomes.
    first = writes[:, :1] + transitions[:, :1] @ initial_state.unsqueeze(1)
    states = _associative_scan(transitions, torch.cat((first, writes[:, 1:]), 1))
    o = scale * (q.to(states.dtype).unsqueeze(-2) @ states).squeeze(-2)
    return o.to(v.dtype), states[:, -1]


def _associative_scan(transitions: Tensor, writes: Tensor) -> Tensor:
    """All states S_t: combine neighbours, solve for every second token, then fill in the others."""
    tokens = writes.shape[1]
    if tokens == 1:
        return writes
    pairs = tokens // 2
    early, late = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    joined = transitions[:, late] @ transitions[:, early]
    joined_writes = transitions[:, late] @ writes[:, early] + writes[:, late]
    odd = _associative_scan(joined, joined_writes)
    even = writes[:, 2::2] + transitions[:, 2::2] @ odd[:, : (tokens - 1) // 2]
    even = torch.cat((writes[:, :1], even), 1)
    states = writes.new_empty(writes.shape)
    states[:, 0::2] = even
    states[:, 1::2] = odd
    return states
