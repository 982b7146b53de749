"""Kimi delta attention in Triton kernels, chunk by chunk, segment by segment.

Forward takes two launches a segment: what the chunks are worth by themselves (triton_prepare), then the
recurrence over them, which writes o (triton_states). Saved for backward: the inputs and the state at each
segment's start. Backward goes from the last segment to the first, six launches each: the first two again,
keeping the state before every chunk; the recurrence of the state's gradient; and the gradients of the
inputs (triton_gradients).

Scratch memory is allocated once and is that of one segment; triton_scratch says which part of it costs
nothing.
"""

from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_compile, refuse_second_derivatives
from oomph.ops.delta_attention import triton_launch as kernels
from oomph.ops.delta_attention.triton_plan import Plan, make_plan
from oomph.ops.delta_attention.triton_scratch import (
    Inputs,
    backward_scratch,
    chunk_states,
    forward_scratch,
    new_states,
)


@no_compile
def fused_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    segment_tokens: int | None,
) -> tuple[Tensor, Tensor]:
    """o [B,T,H,dv] and the final state [B,H,dk,dv] in float32, of arguments that have been checked.

    `segment_tokens`: how many tokens of each sequence are worked on at a time; None chooses.
    """
    q, k, v, log_alpha = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, log_alpha))
    if initial_state is not None:
        initial_state = initial_state.contiguous()
    o, final_state = _FusedKda.apply(
        q, k, v, log_alpha, beta, initial_state, scale, cu_seqlens, segment_tokens
    )
    return o, final_state


class _FusedKda(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        segment_tokens: int | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        inputs = Inputs(q, k, v, log_alpha, beta, initial, scale)
        plan = make_plan(q, v, cu_seqlens, segment_tokens)
        o, final, between = _forward(inputs, plan, keep=any(ctx.needs_input_grad))
        ctx.save_for_backward(q, k, v, log_alpha, beta, initial, between)
        ctx.scale, ctx.plan = scale, plan
        return o, final

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("kda")
        q, k, v, log_alpha, beta, initial, between = ctx.saved_tensors
        inputs = Inputs(q, k, v, log_alpha, beta, initial, ctx.scale)
        return (
            *_backward(inputs, ctx.plan, between, grad_o, grad_final, ctx.needs_input_grad[:6]),
            None,
            None,
            None,
        )


def _forward(inputs: Inputs, plan: Plan, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """o, the final state, and the states between segments (all of them with `keep`, else just two places)."""
    o = inputs.v.new_empty(plan.batch, plan.tokens, plan.heads, plan.dv)
    final = new_states(inputs, plan, plan.sequences)
    if plan.packing is not None:
        # Sequences without tokens are no kernel's.
        final.zero_() if inputs.initial is None else final.copy_(inputs.initial)
    places = plan.segments - 1 if keep else min(2, plan.segments - 1)
    between = (
        new_states(inputs, plan, places * plan.batch).unflatten(0, (places, plan.batch)) if places else None
    )
    scratch = forward_scratch(inputs, plan, o)
    for index in range(plan.segments):
        segment = plan.span(index)
        kernels.prepare(inputs, plan, scratch, segment)
        before = final if between is None else between[(index - 1) % places]
        after = final if between is None else between[index % places]
        kernels.outputs(inputs, plan, scratch, segment, o, (before, after), final)
    return o, final, between


def _backward(
    inputs: Inputs,
    plan: Plan,
    between: Tensor | None,
    grad_o: Tensor | None,
    grad_final: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    if grad_o is None:
        grad_o = inputs.v.new_zeros(plan.batch, plan.tokens, plan.heads, plan.dv)
    grad_o = grad_o.contiguous()
    grads = [_gradient(x) if need else None for x, need in zip(inputs.tensors[:4], needs[:4], strict=True)]
    # Each slice of the keys has a share in beta's gradient, and the values have one.
    shares = (1 + kernels.key_slices(plan), *inputs.beta.shape)
    beta_shares = inputs.beta.new_empty(shares, dtype=torch.float32) if needs[4] else None
    grad_initial = new_states(inputs, plan, plan.sequences) if needs[5] else None
    if grad_initial is not None and plan.packing is not None:
        grad_initial.zero_() if grad_final is None else grad_initial.copy_(grad_final)
    if grad_final is not None:
        grad_final = grad_final.contiguous()
    scratch = backward_scratch(inputs, plan, grads)
    grad_r = torch.empty_like(scratch.u)
    states, grad_states = chunk_states(inputs, plan)
    # Where there is one segment no state is carried, and any tensor will do in its place.
    carried = new_states(inputs, plan, 2 * plan.batch).chunk(2) if plan.segments > 1 else (scratch.decay,) * 2
    for index in reversed(range(plan.segments)):
        segment = plan.span(index)
        kernels.prepare(inputs, plan, scratch, segment)
        before = between[index - 1] if between is not None and index else scratch.decay
        kernels.states(inputs, plan, scratch, segment, states, before)
        # Two places by turns: with packed sequences, one program reads what is carried where another writes.
        places = carried[index % 2], carried[1 - index % 2]
        kernels.state_gradients(
            inputs, plan, scratch, segment, grad_o, grad_r, grad_states, grad_initial, places, grad_final
        )
        if any(needs[:5]):
            kernels.value_gradients(inputs, plan, scratch, segment, grad_o, grad_r, grads[2], beta_shares)
        if any(needs[n] for n in (0, 1, 3, 4)):
            kernels.key_gradients(
                inputs, plan, scratch, segment, grad_o, grad_r, (states, grad_states), grads, beta_shares
            )
    grad_beta = None if beta_shares is None else beta_shares.sum(0).to(inputs.beta.dtype)
    return *grads, grad_beta, grad_initial


def _gradient(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
