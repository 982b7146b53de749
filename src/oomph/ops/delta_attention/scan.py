"""Field report 000's form: a dense transition and a dense write for every token, joined by a scan.

S_t = transitions_t S_{t-1} + writes_t with transitions [B, T, H, K, K] and writes [B, T, H, K, V]: K times
the size of the inputs, and autograd keeps the intermediate results as well. It is here so that its cost can
be shown; `mode="chunked"` computes the same.
"""

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.delta_attention.problem import state_dtype


def precompute_updates(
    k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, *, memory_chunk_size: int | None = 64
) -> tuple[Tensor, Tensor]:
    """(transitions [B, T, H, K, K], writes [B, T, H, K, V]), `memory_chunk_size` tokens at a time.

    The parts are joined to the full size again, so the chunks save part of the intermediate results in
    forward, and nothing of what training keeps. None: all tokens at once.
    """
    size = memory_chunk_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ArgumentError(
            f"memory_chunk_size={size!r} is not valid; choose a number of tokens >= 1, or None"
        )
    wide = state_dtype(k, v, log_alpha, beta)
    step = max(1, k.shape[1]) if size is None else size
    transitions, writes = [], []
    for start in range(0, max(1, k.shape[1]), step):
        part = slice(start, start + step)
        k_part, v_part, log_part, beta_part = (x[:, part].to(wide) for x in (k, v, log_alpha, beta))
        alpha, strength = log_part.exp(), beta_part[..., None, None]
        decay_diag = torch.diag_embed(alpha)
        forget_rank1 = strength * k_part.unsqueeze(-1) * (alpha * k_part).unsqueeze(-2)
        transitions.append(decay_diag - forget_rank1)
        del decay_diag, forget_rank1
        writes.append(strength * k_part.unsqueeze(-1) * v_part.unsqueeze(-2))
    if len(transitions) == 1:
        return transitions[0], writes[0]
    return torch.cat(transitions, 1), torch.cat(writes, 1)


def scan(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor,
    scale: float,
    memory_chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    q, k, v, log_alpha, beta = inputs
    transitions, writes = precompute_updates(k, v, log_alpha, beta, memory_chunk_size=memory_chunk_size)
    # The first write takes in the state that the sequence begins with.
    first = writes[:, :1] + transitions[:, :1] @ state.unsqueeze(1)
    states = _prefixes(transitions, torch.cat((first, writes[:, 1:]), 1))
    out = scale * (q.to(state.dtype).unsqueeze(-2) @ states).squeeze(-2)
    return out.to(v.dtype), states[:, -1]


def _prefixes(transitions: Tensor, writes: Tensor) -> Tensor:
    """All states S_t, by joining neighbours, solving for every other token, and filling in the rest."""
    tokens = writes.shape[1]
    if tokens == 1:
        return writes
    pairs = tokens // 2
    early, late = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    joined = transitions[:, late] @ transitions[:, early]
    joined_writes = transitions[:, late] @ writes[:, early] + writes[:, late]
    odd = _prefixes(joined, joined_writes)
    even = writes[:, 2::2] + transitions[:, 2::2] @ odd[:, : (tokens - 1) // 2]
    even = torch.cat((writes[:, :1], even), 1)
    states = writes.new_empty(writes.shape)
    states[:, 0::2] = even
    states[:, 1::2] = odd
    return states
