"""The autograd functions of chunked KDA, in plain torch and in Triton kernels.

Both process one segment after the other (segments.py). Saved for backward: the inputs, and the states at the
starts of segments. Backward recomputes everything else, from the last segment to the first, so that the
memory of a call is that of one segment whatever the length. On a CPU, a call of one segment also saves some
of its products, see _saves_products.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import OpFunction, no_autocast, no_compile, refuse_second_derivatives
from oomph.ops.delta_attention.chunked import (
    CHUNK,
    ChunkLayout,
    SavedProducts,
    SegmentChunks,
    saved_numbers_per_token,
)
from oomph.ops.delta_attention.intra_chunk import Workspace
from oomph.ops.delta_attention.launch import KDALauncher, kernel_sizes
from oomph.ops.delta_attention.segments import Segment, SegmentPlan

# Plain torch -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkedOptions:
    """`dtype` is that of the state and of all arithmetic."""

    plan: SegmentPlan
    packed: bool
    scale: float
    dtype: torch.dtype


def chunked_kda(
    inputs: tuple[Tensor, ...], initial_state: Tensor | None, options: ChunkedOptions
) -> tuple[Tensor, Tensor]:
    """(o, final state) of q, k, v, log_alpha, beta, which have been checked."""
    return _ChunkedKDA.apply(*inputs, initial_state, options)  # type: ignore[no-any-return]


def _saves_products(options: ChunkedOptions, inputs: tuple[Tensor, ...]) -> bool:
    """On a CPU, where all tokens are one segment: backward would need its products at once anyway, so the
    peak is the same. And only if they take no more than the inputs, as they stay until backward."""
    q, _, v, *_ = inputs
    rows = sum(options.plan.segments[0].widths) * CHUNK * q.shape[2]
    size = rows * saved_numbers_per_token(q.shape[3], v.shape[3]) * options.dtype.itemsize
    return (
        q.device.type == "cpu"
        and len(options.plan.segments) == 1
        and size <= sum(x.numel() * x.element_size() for x in inputs)
    )


class _ChunkedKDA(OpFunction):
    op = "kda"
    instead = "mode='sequential' can"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, initial_state, options = arguments
        q, v, plan = inputs[0], inputs[2], options.plan
        needs_gradient = any(ctx.needs_input_grad)
        shape = (plan.sequences, q.shape[2], q.shape[3], v.shape[3])
        states = _copy_or_zeros(initial_state, shape, q, options.dtype)
        out = v.new_empty(v.shape)
        saved_states = q.new_empty((plan.saved if needs_gradient else 0, *shape[1:]), dtype=options.dtype)
        workspace = Workspace(q, options.dtype)
        save_products = needs_gradient and _saves_products(options, tuple(inputs))
        products: SavedProducts | tuple[()] = ()
        with no_autocast(q):
            for segment in plan.segments:
                state = _select_states(states, segment, options)
                if len(saved_states):
                    _copy_continued_states(saved_states, segment, state, save=True)
                layout = ChunkLayout(segment, options.packed, q.device)
                chunks = SegmentChunks(layout, tuple(inputs), options.scale, workspace)
                layout.scatter(chunks.with_heads(chunks.forward(state.flatten(0, 1))), out)
                products = chunks.products_to_save() if save_products else ()
                del chunks  # nothing of one segment is left when the next begins
                _return_states(states, state, segment, options)
        ctx.save_for_backward(*inputs, initial_state, saved_states, *products)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("kda", "mode='sequential' can")
        saved = ctx.saved_tensors  # once: checkpointing unpacks every tensor once
        *inputs, initial_state, saved_states = saved[:7]
        products, options = saved[7:] or None, ctx.options
        grad_out, grad_state = grads
        wanted = ctx.needs_input_grad[:6]
        shape = (options.plan.sequences, *saved_states.shape[1:])
        grad_states = _copy_or_zeros(grad_state, shape, saved_states, options.dtype)
        into = [x.new_empty(x.shape) if want else None for x, want in zip(inputs, wanted, strict=False)]
        workspace = Workspace(saved_states, options.dtype)
        with no_autocast(inputs[0]):
            for segment in reversed(options.plan.segments):
                layout = ChunkLayout(segment, options.packed, grad_states.device)
                chunks = SegmentChunks(layout, tuple(inputs), options.scale, workspace, True, products)
                start = _start_states(saved_states, initial_state, segment, options)
                grad = _select_states(grad_states, segment, options)
                _backward_of_segment(chunks, start, grad_out, grad, into)
                del chunks, start
                _return_states(grad_states, grad, segment, options)
        return *into, grad_states if wanted[5] else None, None


def _backward_of_segment(
    chunks: SegmentChunks,
    start: Tensor,
    grad_out: Tensor | None,
    grad_state: Tensor,
    into: list[Tensor | None],
) -> None:
    want_rest = any(into[index] is not None for index in (0, 1, 3))
    grads = chunks.backward(start.flatten(0, 1), grad_out, grad_state.flatten(0, 1), want_rest)
    if into[2] is not None:
        chunks.layout.scatter(chunks.with_heads(grads.v), into[2])
    if into[4] is not None:
        chunks.layout.scatter(chunks.with_heads(grads.beta), into[4].unsqueeze(-1))
    if grads.rest is not None:
        for index, grad in ((0, grads.rest.q), (1, grads.rest.k), (3, grads.rest.log_alpha)):
            target = into[index]
            if target is not None:
                chunks.layout.scatter(grad.unflatten(2, (-1, chunks.heads)), target)


def _copy_or_zeros(given: Tensor | None, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """States, or their gradients, that may be overwritten."""
    if given is None:
        return like.new_zeros(shape, dtype=dtype)
    return given.clone(memory_format=torch.contiguous_format)


def _start_states(
    saved_states: Tensor, initial_state: Tensor | None, segment: Segment, options: ChunkedOptions
) -> Tensor:
    """The states at the start of the segment, which may be overwritten."""
    count = len(segment.ranges)
    if len(segment.continued) == count:
        return saved_states[segment.saved : segment.saved + count].clone()
    if initial_state is None:
        state = saved_states.new_zeros((count, *saved_states.shape[1:]))
    else:
        state = _select_states(initial_state, segment, options)
        state = state.clone(memory_format=torch.contiguous_format)
    _copy_continued_states(saved_states, segment, state, save=False)
    return state


def _copy_continued_states(saved: Tensor, segment: Segment, state: Tensor, save: bool) -> None:
    """Between the saved states and those of the segment's ranges that continue an earlier segment."""
    count = len(segment.continued)
    rows = saved[segment.saved : segment.saved + count]
    if count == len(state):  # as in a batch, after the first segment
        rows.copy_(state) if save else state.copy_(rows)
    else:
        for row, index in zip(rows, segment.continued, strict=True):
            row.copy_(state[index]) if save else state[index].copy_(row)


def _sequence_index(segment: Segment, device: torch.device) -> Tensor:
    return torch.tensor([each.sequence for each in segment.ranges], device=device)


def _select_states(states: Tensor, segment: Segment, options: ChunkedOptions) -> Tensor:
    """Those of the segment's sequences: the tensor itself, or with packed sequences a copy."""
    return states[_sequence_index(segment, states.device)] if options.packed else states


def _return_states(states: Tensor, state: Tensor, segment: Segment, options: ChunkedOptions) -> None:
    if options.packed:
        states[_sequence_index(segment, states.device)] = state


# Triton ----------------------------------------------------------------------------------------------


@no_compile
def triton_kda(
    inputs: tuple[Tensor, ...],
    initial_state: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None = None,
    segment_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(o [B, T, H, dv], final state [B, H, dk, dv] in float32) of arguments that have been checked.

    segment_tokens: how many tokens of each sequence are processed at a time; None chooses. Forward launches
    two kernels per segment, backward six. Scratch memory is allocated once and is that of one segment.
    """
    *first, beta = inputs
    first = [x if x.stride(-1) == 1 else x.contiguous() for x in first]
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    o, final_state = _TritonKDA.apply(*first, beta, initial_state, scale, cu_seqlens, segment_tokens)
    return o, final_state


class _TritonKDA(OpFunction):
    op = "kda"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *inputs, initial_state, scale, cu_seqlens, segment_tokens = arguments
        ctx.set_materialize_grads(False)
        sizes = kernel_sizes(inputs[0], inputs[2], cu_seqlens, segment_tokens)
        kernels = KDALauncher(inputs, initial_state, scale, sizes)
        o, final, segment_states = _triton_forward(kernels, save=any(ctx.needs_input_grad))
        ctx.save_for_backward(*inputs, initial_state, segment_states)
        ctx.scale, ctx.sizes = scale, sizes
        return o, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("kda")
        *inputs, initial_state, segment_states = ctx.saved_tensors
        kernels = KDALauncher(inputs, initial_state, ctx.scale, ctx.sizes)
        grad_o, grad_final = grads
        made = _triton_backward(kernels, segment_states, grad_o, grad_final, ctx.needs_input_grad[:6])
        return *made, None, None, None


def _triton_forward(kernels: KDALauncher, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """o, the final state, and the states between segments (with `save` all of them, else the last two)."""
    sizes = kernels.sizes
    o = kernels.v.new_empty(sizes.batch, sizes.tokens, sizes.heads, sizes.dv)
    final = kernels.new_states(sizes.sequences)
    if sizes.packed:
        # No kernel stores the state of a sequence without tokens.
        final.zero_() if kernels.initial_state is None else final.copy_(kernels.initial_state)
    count = sizes.segments - 1 if save else min(2, sizes.segments - 1)
    segment_states = kernels.new_states(count, sizes.batch) if count else None
    kernels.allocate_forward(o)
    for index in range(sizes.segments):
        segment = sizes.segment_chunks(index)
        kernels.prepare_chunks(segment)
        before = final if segment_states is None else segment_states[(index - 1) % count]
        after = final if segment_states is None else segment_states[index % count]
        kernels.forward_states(segment, before, outputs=(o, after, final))
    return o, final, segment_states


def _triton_backward(
    kernels: KDALauncher,
    segment_states: Tensor | None,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    sizes = kernels.sizes
    if grad_o is None:
        grad_o = kernels.v.new_zeros(sizes.batch, sizes.tokens, sizes.heads, sizes.dv)
    grad_o = grad_o.contiguous()
    grads = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else None
        for x, need in zip(kernels.inputs[:4], needs[:4], strict=True)
    ]
    beta_parts = kernels.new_beta_parts() if needs[4] else None
    grad_initial = kernels.new_states(sizes.sequences) if needs[5] else None
    if grad_initial is not None and sizes.packed:
        grad_initial.zero_() if grad_final is None else grad_initial.copy_(grad_final)
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    kernels.allocate_backward(grads)
    grad_v_new = torch.empty_like(kernels.u)
    states, grad_states = kernels.new_chunk_states()
    # With one segment no state is carried, and the kernels do not read this argument.
    carried = (kernels.decay,) * 2
    if sizes.segments > 1:
        carried = kernels.new_states(2 * sizes.batch).chunk(2)  # type: ignore[assignment]
    for index in reversed(range(sizes.segments)):
        segment = sizes.segment_chunks(index)
        kernels.prepare_chunks(segment)
        before = segment_states[index - 1] if segment_states is not None and index else kernels.decay
        kernels.forward_states(segment, before, chunk_states=states)
        # Two buffers in turn: with packed sequences, one program reads the carried gradient of a sequence
        # where another stores that of the next.
        before_and_after = carried[index % 2], carried[1 - index % 2]
        kernels.backward_states(
            segment, grad_o, grad_v_new, grad_states, grad_initial, before_and_after, grad_final
        )
        if any(needs[:5]):
            kernels.backward_values(segment, grad_o, grad_v_new, grads[2], beta_parts)
        if any(needs[index] for index in (0, 1, 3, 4)):
            kernels.backward_keys(segment, grad_o, grad_v_new, (states, grad_states), grads, beta_parts)
    grad_beta = None if beta_parts is None else beta_parts.sum(0).to(kernels.beta.dtype)
    return *grads, grad_beta, grad_initial
