"""The autograd function of KDA in Triton kernels.

It processes one segment after the other (segments.py). Saved for backward: the inputs, and the states at the
starts of segments. Backward recomputes everything else, from the last segment to the first, so that the
memory of a call is that of one segment whatever the length.
"""

from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import OpFunction, no_compile, refuse_second_derivatives
from oomph.ops.delta_attention.launch import KDALauncher, kernel_sizes


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
