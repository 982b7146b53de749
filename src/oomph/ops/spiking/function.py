"""The one autograd function of the gate: what is kept for backward, and which gradients are made.

Kept: the slope of each spike, [B, T, N] in the dtype of the drive, and not the drive: as much as the input
takes, which nothing else keeps where it is the output of a linear layer. The slope and not the membrane,
because rounding it to 16 bits costs a constant 0.2 %, where a rounded membrane would be multiplied by beta in
the exponent. A trained decay needs the membranes too, kept likewise.

With G_t the gradient of the membrane before the reset, c_t = beta * slope_t and g_t that of the one after:
    G_t = g_t + (grad_spikes_t - threshold * g_t) * c_t        g_{t-1} = decay * G_t
    grad_drive_t = G_t        grad_decay = sum of G_t * m_{t-1}        grad_initial = g_{-1}
"""

from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_autocast, refuse_second_derivatives
from oomph.ops.spiking.problem import Engine, Neuron


class LIFGate(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        drive_BTN: Tensor,
        decay_N: Tensor | None,
        initial_BN: Tensor | None,
        neuron: Neuron,
        engine: Engine,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        """`keep`: a backward may come."""
        want_drive, want_decay, want_initial, *_ = ctx.needs_input_grad
        keep_slope = keep and (want_drive or want_decay or want_initial)
        with no_autocast(drive_BTN):
            made = engine.forward(drive_BTN, decay_N, initial_BN, neuron, keep_slope, keep and want_decay)
        ctx.save_for_backward(made.slope_BTN, made.before_BTN, decay_N if keep_slope else None)
        ctx.neuron, ctx.engine = neuron, engine
        ctx.initial_dtype = None if initial_BN is None else initial_BN.dtype
        ctx.set_materialize_grads(False)  # zeros for spikes that nobody used would be as large as they are
        return made.spikes_BTN, made.membrane_BN

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_spikes_BTN: Tensor | None, grad_membrane_BN: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("lif_gate")
        slope_BTN, before_BTN, decay_N = ctx.saved_tensors
        want_drive, want_decay, want_initial, *_ = ctx.needs_input_grad
        if grad_spikes_BTN is None and grad_membrane_BN is None:
            return (None,) * 6
        with no_autocast(slope_BTN):
            grads = ctx.engine.backward(
                slope_BTN, before_BTN, decay_N, grad_spikes_BTN, grad_membrane_BN, ctx.neuron
            )
        return (
            grads.drive_BTN if want_drive else None,
            grads.decay_BN.sum(0) if want_decay else None,
            grads.initial_BN.to(ctx.initial_dtype) if want_initial else None,
            None,
            None,
            None,
        )
