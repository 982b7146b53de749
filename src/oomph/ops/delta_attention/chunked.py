"""The chunked form in plain torch: segment by segment, in forward and in backward.

Kept for backward: the inputs, and the states at the starts of segments. All else is made again, one segment
at a time, so that the memory of a call is that of one segment whatever the length. Where that is the only one
a CPU keeps some of it, see _keeps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_autocast, refuse_second_derivatives
from oomph.ops.delta_attention.buffers import Buffers
from oomph.ops.delta_attention.chunks import Chunks, Kept, kept_per_token
from oomph.ops.delta_attention.layout import Layout
from oomph.ops.delta_attention.segments import Plan, Segment

CHUNK = 32
BLOCK = 8


@dataclass(frozen=True)
class Call:
    """What is not a tensor. `dtype` is that of the state and of all arithmetic."""

    plan: Plan
    packed: bool
    scale: float
    dtype: torch.dtype


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, initial_state: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    return _ChunkedKDA.apply(q, k, v, log_alpha, beta, initial_state, call)  # type: ignore[no-any-return]


def _keeps(call: Call, inputs: tuple[Tensor, ...]) -> bool:
    """Does backward get more than the inputs and states?

    On a CPU, where all is one segment: backward would need it all at once anyway, so that its peak is the
    same. And no more than the inputs take, for it stays until backward comes.
    """
    q, _, v, *_ = inputs
    numbers = sum(call.plan.segments[0].widths) * CHUNK * q.shape[2]
    kept = numbers * kept_per_token(q.shape[3], v.shape[3], CHUNK) * call.dtype.itemsize
    given = sum(x.numel() * x.element_size() for x in inputs)
    return q.device.type == "cpu" and len(call.plan.segments) == 1 and kept <= given


class _ChunkedKDA(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        plan, inputs = call.plan, (q, k, v, log_alpha, beta)
        shape = (plan.streams, q.shape[2], q.shape[3], v.shape[3])
        states = _initial(initial_state, shape, q, call.dtype)
        out = v.new_empty(v.shape)
        saved = q.new_empty((plan.saved if any(ctx.needs_input_grad) else 0, *shape[1:]), dtype=call.dtype)
        buffers = Buffers(q, call.dtype)
        kept: Kept | tuple[()] = ()
        keep = any(ctx.needs_input_grad) and _keeps(call, inputs)
        with no_autocast(q):
            for segment in plan.segments:
                here = _of_segment(states, segment, call)
                if len(saved):
                    _copy_resuming(saved, segment, here, save=True)
                kept = _forward_of_segment(call, inputs, segment, here, out, buffers, keep)
                _return(states, here, segment, call)
        ctx.save_for_backward(*inputs, initial_state, saved, *kept)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, states

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("kda", "mode='sequential' can")
        q, k, v, log_alpha, beta, initial_state, saved, *kept = ctx.saved_tensors
        given = _Saved((q, k, v, log_alpha, beta), initial_state, saved, tuple(kept) or None)  # type: ignore[arg-type]
        with no_autocast(q):
            return *_backward(ctx.call, given, grad_out, grad_state, ctx.needs_input_grad[:6]), None


def _forward_of_segment(
    call: Call,
    inputs: tuple[Tensor, ...],
    segment: Segment,
    state: Tensor,
    out: Tensor,
    buffers: Buffers,
    keep: bool,
) -> Kept | tuple[()]:
    layout = Layout(segment, BLOCK, call.packed, state.device)
    chunks = Chunks(layout, inputs, call.scale, buffers)
    layout.put(out, chunks.rows_of_heads(chunks.forward(state.flatten(0, 1))))
    return chunks.to_keep() if keep else ()


@dataclass(frozen=True)
class _Saved:
    inputs: tuple[Tensor, ...]  # q, k, v, log_alpha, beta
    initial_state: Tensor | None
    states: Tensor  # at the starts of segments
    kept: Kept | None

    def at_start(self, segment: Segment, call: Call) -> Tensor:
        """The states with which the segment's streams begin it, free to be overwritten."""
        if len(segment.resuming) == len(segment.pieces):
            return self.states[segment.saved : segment.saved + len(segment.pieces)].clone()
        if self.initial_state is None:
            here = self.states.new_zeros((len(segment.pieces), *self.states.shape[1:]))
        else:
            here = _of_segment(self.initial_state, segment, call).clone(memory_format=torch.contiguous_format)
        _copy_resuming(self.states, segment, here, save=False)
        return here


def _copy_resuming(saved: Tensor, segment: Segment, here: Tensor, save: bool) -> None:
    """Between the saved states and those of the segment's pieces that go on from an earlier segment."""
    count = len(segment.resuming)
    rows = saved[segment.saved : segment.saved + count]
    if count == len(here):  # as in a batch, after the first segment
        rows.copy_(here) if save else here.copy_(rows)
    else:
        for row, place in zip(rows, segment.resuming, strict=True):
            row.copy_(here[place]) if save else here[place].copy_(row)


def _backward(
    call: Call,
    given: _Saved,
    grad_out: Tensor | None,
    grad_state: Tensor | None,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    shape = (call.plan.streams, *given.states.shape[1:])
    grad_states = _initial(grad_state, shape, given.states, call.dtype)
    made = [x.new_empty(x.shape) if want else None for x, want in zip(given.inputs, wanted, strict=False)]
    buffers = Buffers(given.states, call.dtype)
    for segment in reversed(call.plan.segments):
        # A function of its own, so that nothing of one segment is left when the next begins.
        _backward_of_segment(call, given, segment, grad_out, grad_states, made, wanted, buffers)
    return [*made, grad_states if wanted[5] else None]


def _backward_of_segment(
    call: Call,
    given: _Saved,
    segment: Segment,
    grad_out: Tensor | None,
    grad_states: Tensor,
    into: list[Tensor | None],
    wanted: tuple[bool, ...],
    buffers: Buffers,
) -> None:
    layout = Layout(segment, BLOCK, call.packed, grad_states.device)
    here = _of_segment(grad_states, segment, call)
    chunks = Chunks(layout, given.inputs, call.scale, buffers, again=True, kept=given.kept)
    start = given.at_start(segment, call).flatten(0, 1)
    grads = chunks.backward(start, grad_out, here.flatten(0, 1), wanted[0] or wanted[1] or wanted[3])
    heads = given.inputs[0].shape[2]
    if into[2] is not None:
        layout.put(into[2], chunks.rows_of_heads(grads.v))
    if into[4] is not None:
        layout.put(into[4].unsqueeze(-1), chunks.rows_of_heads(grads.beta))
    if grads.rest is not None:
        for place, grad in ((0, grads.rest.q), (1, grads.rest.k), (3, grads.rest.log_alpha)):
            target = into[place]
            if target is not None:
                layout.put(target, grad.unflatten(2, (-1, heads)))
    _return(grad_states, here, segment, call)


def _initial(given: Tensor | None, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """States, or their gradients, that may be overwritten; zeros where none were given."""
    if given is None:
        return like.new_zeros(shape, dtype=dtype)
    return given.clone(memory_format=torch.contiguous_format)


def _streams(segment: Segment, device: torch.device) -> Tensor:
    return torch.tensor([piece.stream for piece in segment.pieces], device=device)


def _of_segment(states: Tensor, segment: Segment, call: Call) -> Tensor:
    """Those of the segment's streams: the states themselves, or where sequences are packed a copy."""
    return states[_streams(segment, states.device)] if call.packed else states


def _return(states: Tensor, here: Tensor, segment: Segment, call: Call) -> None:
    if call.packed:
        states[_streams(segment, states.device)] = here
