"""The bytes that the chunked forms need beside inputs, outputs and gradients, by the segment's length."""

import torch

from oomph.ops.delta_attention.chunked import CHUNK
from oomph.ops.delta_attention.problem import Problem
from oomph.ops.delta_attention.segments import Costs
from oomph.units import KiB, MiB

# By default: longer segments take fewer operations, each on more; a GPU's kernels need no more to be busy.
_DEFAULT_BYTES = 256 * MiB
# Allocators round the sizes of a dozen tensors up.
_ROUNDING = 16 * KiB


def torch_costs(p: Problem) -> Costs:
    """Counted in predictions of backward; an upper bound, by up to a fifth."""
    heads, keys, values = p.q.shape[2:] + p.v.shape[3:]
    rows = p.q.shape[0] * heads * p.state_dtype.itemsize
    of_products = 23 * keys + 2 * values + 4 * CHUNK
    of_states = 12 * keys + 6 * values + 2 * keys * values // CHUNK + 7 * CHUNK
    state = rows * keys * values
    return Costs(rows * max(of_products, of_states), 3 * state + _ROUNDING, state)


def torch_default(p: Problem, costs: Costs) -> int:
    return max(4 * CHUNK, _DEFAULT_BYTES // max(1, costs.per_token))


def triton_costs(p: Problem) -> tuple[Costs, int]:
    """And the tokens of a chunk, of which segments are multiples. As triton_scratch and fused allocate."""
    from oomph.ops.delta_attention.triton_plan import CHUNK as chunk

    heads, keys, values = p.q.shape[2:] + p.v.shape[3:]
    rows, item = p.q.shape[0] * heads, p.q.dtype.itemsize
    scores, decay = chunk * chunk * item, 3 * keys * 4 + 4
    if p.needs_gradient:
        per_row = item * (2 * values + (0 if _keys_are_borrowed(p) else 3 * keys))
        per_chunk = 2 * scores + decay + 2 * keys * values * item
        # Whatever the segments: the shares of beta's gradient, and their sum.
        shares = rows * p.tokens * 4 * (2 + _key_slices(keys)) if p.beta.requires_grad else 0
    else:
        per_row, per_chunk, shares = item * 3 * keys, scores + decay, 0
    state = rows * keys * values * torch.float32.itemsize
    # Two states are carried; and a last chunk takes the room of a whole one.
    fixed = 2 * state + shares + rows * per_chunk + _ROUNDING
    return Costs(rows * (per_row + -(-per_chunk // chunk)), fixed, state), chunk


def _keys_are_borrowed(p: Problem) -> bool:
    """Products of the keys are kept where gradients of their size will be, if there are three such."""
    of_values = p.v.requires_grad and p.v.shape == p.k.shape
    of_decay = p.log_alpha.requires_grad and p.log_alpha.dtype == p.k.dtype
    return p.q.requires_grad and p.k.requires_grad and (of_values or of_decay)


def _key_slices(keys: int) -> int:
    """How many programs share the channels of a chunk's keys: each has a share in beta's gradient."""
    from oomph.ops.delta_attention.triton_launch import KEYS_TILE
    from oomph.ops.delta_attention.triton_plan import power_of_two

    return -(-keys // min(KEYS_TILE.keys, power_of_two(keys)))
