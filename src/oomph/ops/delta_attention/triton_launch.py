"""How the kernels of delta attention are started: their tiles, and their arguments.

Chunks have 32 tokens, so that the products of a chunk run on the tensor cores' instructions for single
warps. With 64 tokens Triton takes Hopper's instructions for groups of warps, and versions 3.4 to 3.7
compile kernels like these wrongly (3.6 on an H200: these very kernels with 64 tokens, right in the
interpreter, gave false results or illegal accesses, depending on the number of warps).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.delta_attention.triton_plan import Plan, Span, power_of_two
from oomph.ops.delta_attention.triton_scratch import Inputs, Scratch
from oomph.ops.launch import Kernels, interpreted

_PREPARE = Kernels("oomph.ops.delta_attention.triton_prepare")
_STATES = Kernels("oomph.ops.delta_attention.triton_states")
_GRADIENTS = Kernels("oomph.ops.delta_attention.triton_gradients")


@dataclass(frozen=True)
class Tile:
    """Channels of the keys and of the values that a program takes at a time (0: it takes none, or all)."""

    keys: int
    values: int
    warps: int
    stages: int
    registers: int | None = None  # at most, of a thread


PREPARE_TILE = Tile(keys=64, values=64, warps=2, stages=1)
FORWARD_TILE = Tile(keys=0, values=16, warps=4, stages=3)
BACKWARD_TILE = Tile(keys=0, values=16, warps=4, stages=3)
VALUES_TILE = Tile(keys=0, values=128, warps=2, stages=1)
KEYS_TILE = Tile(keys=32, values=128, warps=2, stages=1)

# Up to which sum of log-decays over half a chunk, exp(-sum) times a key stays well within the dtype's range.
_NARROW = {torch.bfloat16: 60.0, torch.float32: 10.0, torch.float16: 6.0}


# Of the nominal bf16 rate: small products of single warps, one after the other. As measured on an H200 with
# dk = dv = 128 and 4,096 to 131,072 tokens.
_EFFICIENCY = 0.046


def prepare(inputs: Inputs, plan: Plan, scratch: Scratch, segment: Span) -> None:
    """What the segment's chunks are worth without the state before them."""
    _PREPARE.launch(
        "prepare_chunks",
        (segment.chunks * plan.batch * plan.heads,),
        *inputs.tensors,
        scratch.w,
        scratch.key_out,
        scratch.query_in,
        scratch.u,
        scratch.scores,
        scratch.inverse,
        scratch.decay,
        scratch.narrow,
        *_chunk_tables(plan),
        inputs.scale,
        segment.first,
        segment.chunks,
        plan.tokens,
        plan.heads,
        *scratch.rows,
        *inputs.strides("01234"),
        DK=plan.dk,
        **_value_block(plan, PREPARE_TILE),
        **_key_block(plan, PREPARE_TILE),
        LEVELS=plan.levels,
        PARTS=_parts(inputs.log_alpha.dtype),
        WHOLE_KEYS=scratch.whole_keys,
        KEEP_INVERSE=scratch.inverse is not None,
        NARROW=_NARROW[inputs.k.dtype],
        **_cost(plan, segment, key_products=3, value_products=1, inversion=True),
        **_common(inputs, plan, scratch, PREPARE_TILE),
    )


def outputs(
    inputs: Inputs,
    plan: Plan,
    scratch: Scratch,
    segment: Span,
    o: Tensor,
    carried: tuple[Tensor, Tensor],
    final: Tensor,
) -> None:
    """The recurrence over the segment's chunks, for o. `carried`: the states before and after the segment."""
    _run_forward_states(inputs, plan, scratch, segment, o, None, *carried, final)


def states(
    inputs: Inputs, plan: Plan, scratch: Scratch, segment: Span, chunk_states: Tensor, before: Tensor
) -> None:
    """The recurrence again, for the state before every chunk; u becomes r."""
    _run_forward_states(inputs, plan, scratch, segment, None, chunk_states, before, None, None)


def _run_forward_states(
    inputs: Inputs,
    plan: Plan,
    scratch: Scratch,
    segment: Span,
    o: Tensor | None,
    chunk_states: Tensor | None,
    before: Tensor,
    after: Tensor | None,
    final: Tensor | None,
) -> None:
    _STATES.launch(
        "forward_states",
        (_state_programs(plan, FORWARD_TILE),),
        scratch.w,
        scratch.key_out,
        scratch.query_in,
        scratch.u,
        scratch.scores,
        scratch.decay,
        o,
        chunk_states,
        inputs.initial,
        before,
        after,
        final,
        *_sequence_tables(plan),
        segment.first,
        segment.chunks,
        plan.chunks,
        plan.tokens,
        plan.heads,
        *scratch.rows,
        DK=plan.dk,
        BLOCK_K=power_of_two(plan.dk),
        **_value_block(plan, FORWARD_TILE),
        WHOLE_KEYS=scratch.whole_keys,
        HAS_INITIAL=inputs.initial is not None,
        OUTPUT=o is not None,
        **_cost(plan, segment, state_products=2 + (o is not None), value_products=int(o is not None)),
        **_common(inputs, plan, scratch, _state_tile(inputs, plan, FORWARD_TILE)),
    )


def state_gradients(
    inputs: Inputs,
    plan: Plan,
    scratch: Scratch,
    segment: Span,
    grad_o: Tensor,
    grad_r: Tensor,
    grad_states: Tensor,
    grad_initial: Tensor | None,
    carried: tuple[Tensor, Tensor],
    grad_final: Tensor | None,
) -> None:
    """The recurrence of the state's gradient, from the segment's last chunk to its first."""
    _STATES.launch(
        "backward_states",
        (_state_programs(plan, BACKWARD_TILE),),
        scratch.w,
        scratch.key_out,
        scratch.query_in,
        scratch.scores,
        scratch.decay,
        grad_o,
        grad_r,
        grad_states,
        grad_initial,
        *carried,
        grad_final,
        *_sequence_tables(plan),
        segment.first,
        segment.chunks,
        plan.chunks,
        plan.tokens,
        plan.heads,
        *scratch.rows,
        DK=plan.dk,
        BLOCK_K=power_of_two(plan.dk),
        **_value_block(plan, BACKWARD_TILE),
        WHOLE_KEYS=scratch.whole_keys,
        HAS_FINAL=grad_final is not None,
        HAS_INITIAL=grad_initial is not None,
        **_cost(plan, segment, state_products=3, value_products=1),
        **_common(inputs, plan, scratch, _state_tile(inputs, plan, BACKWARD_TILE)),
    )


def value_gradients(
    inputs: Inputs,
    plan: Plan,
    scratch: Scratch,
    segment: Span,
    grad_o: Tensor,
    grad_r: Tensor,
    grad_v: Tensor | None,
    beta_shares: Tensor | None,
) -> None:
    """The values' gradient, and what the keys' gradients are made of."""
    _GRADIENTS.launch(
        "value_gradients",
        (segment.chunks * plan.batch * plan.heads,),
        inputs.v,
        inputs.beta,
        grad_o,
        scratch.u,
        grad_r,
        scratch.scores,
        scratch.inverse,
        grad_v,
        beta_shares,
        *_chunk_tables(plan),
        inputs.scale,
        segment.first,
        segment.chunks,
        plan.tokens,
        plan.heads,
        scratch.rows[1],
        *inputs.strides("24"),
        **_value_block(plan, VALUES_TILE),
        GRAD_V=grad_v is not None,
        GRAD_BETA=beta_shares is not None,
        **_cost(plan, segment, value_products=3),
        **_common(inputs, plan, scratch, VALUES_TILE),
    )


def key_gradients(
    inputs: Inputs,
    plan: Plan,
    scratch: Scratch,
    segment: Span,
    grad_o: Tensor,
    grad_r: Tensor,
    chunk_states: tuple[Tensor, Tensor],
    grads: Sequence[Tensor | None],
    beta_shares: Tensor | None,
) -> None:
    """The gradients of queries, keys and log-decays: for narrow chunks, then for the others."""
    grad_q, grad_k, _, grad_la = grads
    parts, gradient_parts = _parts(inputs.log_alpha.dtype), _parts(inputs.k.dtype, more=1)
    strides = inputs.strides("0134")
    for narrow in (True, False):
        _GRADIENTS.launch(
            "key_gradients",
            (segment.chunks * plan.batch * plan.heads * key_slices(plan),),
            inputs.q,
            inputs.k,
            inputs.log_alpha,
            inputs.beta,
            grad_o,
            scratch.u,
            grad_r,
            *chunk_states,
            scratch.scores,
            scratch.inverse,
            scratch.decay,
            scratch.narrow,
            grad_q,
            grad_k,
            grad_la,
            beta_shares,
            *_chunk_tables(plan),
            inputs.scale,
            segment.first,
            segment.chunks,
            plan.tokens,
            plan.heads,
            scratch.rows[1],
            plan.batch * plan.tokens * plan.heads,
            *strides,
            DK=plan.dk,
            **_value_block(plan, KEYS_TILE),
            **_key_block(plan, KEYS_TILE),
            LEVELS=plan.levels,
            PARTS=parts,
            # Sums of gradients cancel: they keep twice the bits of the result, where that can be.
            GRADIENT_PARTS=gradient_parts,
            GRAD_Q=grad_q is not None,
            GRAD_K=grad_k is not None,
            GRAD_LA=grad_la is not None,
            GRAD_BETA=beta_shares is not None,
            NARROW=narrow,
            # Wide chunks are rare.
            **(_cost(plan, segment, state_products=3, key_products=4) if narrow else {"passes": 0.0}),
            **_common(inputs, plan, scratch, KEYS_TILE),
        )


def key_slices(plan: Plan) -> int:
    """How many programs share the channels of a chunk's keys."""
    return -(-plan.dk // _key_block(plan, KEYS_TILE)["BLOCK_K"])


def _state_programs(plan: Plan, tile: Tile) -> int:
    return plan.sequences * plan.heads * -(-plan.dv // _value_block(plan, tile)["BLOCK_V"])


def _state_tile(inputs: Inputs, plan: Plan, tile: Tile) -> Tile:
    """Large states take more warps, and tiles of them leave no room for a second stage."""
    if plan.dk > 128:
        return Tile(tile.keys, tile.values, 8, 1, tile.registers)
    if inputs.k.element_size() > 2:
        return Tile(tile.keys, tile.values, tile.warps, 1, tile.registers)
    return tile


def _key_block(plan: Plan, tile: Tile) -> dict[str, int]:
    return {"BLOCK_K": min(tile.keys, power_of_two(plan.dk))}


def _value_block(plan: Plan, tile: Tile) -> dict[str, int]:
    return {"DV": plan.dv, "BLOCK_V": min(tile.values, power_of_two(plan.dv))}


def _cost(
    plan: Plan,
    segment: Span,
    state_products: int = 0,
    key_products: int = 0,
    value_products: int = 0,
    inversion: bool = False,
) -> dict[str, float]:
    """For predictions of time: the products of every chunk, and the part of the tensors that they go over.

    Of rows with a state: chunk x dk x dv. Of rows with rows: chunk x chunk, over the keys' or values' width.
    """
    c, dk, dv = plan.chunk, plan.dk, plan.dv
    each = state_products * c * dk * dv + c * c * (key_products * dk + value_products * dv)
    each += 2 * plan.levels * c**3 if inversion else 0
    flops = 2.0 * segment.chunks * plan.batch * plan.heads * each
    return {"flops": flops, "passes": segment.chunks / plan.chunks, "efficiency": _EFFICIENCY}


def _common(inputs: Inputs, plan: Plan, scratch: Scratch, tile: Tile) -> dict[str, Any]:
    return {
        "CHUNK": plan.chunk,
        # Three products of 11-bit parts keep what float32 has; of 16-bit inputs, only X is concerned.
        "PRECISION": "tf32x3" if inputs.k.dtype == torch.float32 else "tf32",
        "PACKED": plan.packing is not None,
        "WHOLE_VALUES": scratch.whole_values,
        "maxnreg": tile.registers,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _parts(dtype: torch.dtype, more: int = 0) -> int:
    """How many bfloat16 numbers a value is cut into where sums must be exact; 0 in the interpreter."""
    if interpreted():
        return 0
    return min(3, {torch.bfloat16: 1, torch.float16: 2}.get(dtype, 3) + more)


def _chunk_tables(plan: Plan) -> tuple[Tensor | None, ...]:
    return (None, None) if plan.packing is None else (plan.packing.start, plan.packing.rows)


def _sequence_tables(plan: Plan) -> tuple[Tensor | None, ...]:
    return *_chunk_tables(plan), None if plan.packing is None else plan.packing.sequence_chunk
