"""The public function `lif_gate`: checks the arguments, chooses an implementation, runs it."""

import math
from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.spiking.autograd import LIFConstants, LIFGate
from oomph.ops.spiking.reference import lif_gate_reference

IMPLS = ("auto", "reference", "chunked", "triton")


def choose(drive: Tensor, impl: str, **options: Any) -> common.Choice:
    common.check_one_of("impl", impl, IMPLS)
    _check(drive, **options)
    return common.choose_triton_or_torch(
        impl,
        drive,
        common.why_not_triton(drive),
        kernels="on CUDA one kernel loops over time, where plain torch launches several per step",
        plain="a loop over time in plain torch",
    )


@common.explained_by(choose)
@common.opaque_op
def lif_gate(
    drive: Tensor,
    *,
    decay: float,
    threshold: float,
    surrogate_beta: float,
    initial: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A leaky integrate-and-fire neuron per channel: (spikes, membrane); reference.py has the definition.

    drive [B, T, ...], time second. spikes, of the same shape and dtype, are 0 or 1 (NaN from where the drive
    is NaN). membrane [B, ...] is the state after the last step and its reset, in float32 (float64 for float64
    drives): given as `initial` of the next call, it continues the sequence, gradients included.
    With T = 0 it is `initial`, or zeros.

    decay in [0, 1], threshold > 0. The gradient of a spike by its membrane is that of
    sigmoid(surrogate_beta * (m - threshold)), and also flows through the reset.

    Membranes are float32 or wider whatever the dtype, with the same roundings in every implementation. Saved
    for backward: the slope of each spike in the dtype of the drive, as large as the drive, which is not
    saved. Second derivatives are refused, except by impl="reference".

    impl: "auto", "chunked" (plain torch), "triton" (one kernel forward, one backward), "reference".
    """
    choice = common.log_choice("lif_gate", choose(**locals()))
    if choice.impl == "reference":
        return lif_gate_reference(drive, decay, threshold, surrogate_beta, initial)
    batch, trailing = drive.shape[0], drive.shape[2:]
    channels = trailing.numel()
    constants = LIFConstants(float(decay), float(threshold), float(surrogate_beta))
    spikes_BTN, membrane_BN = LIFGate.apply(  # type: ignore[no-untyped-call]
        drive.reshape(batch, drive.shape[1], channels),
        None if initial is None else initial.reshape(batch, channels),
        constants,
        choice.impl,
        torch.is_grad_enabled(),  # here, because it is always off within an autograd function
    )
    return spikes_BTN.view(drive.shape), membrane_BN.view(batch, *trailing)


def _check(
    drive: Tensor, decay: float, threshold: float, surrogate_beta: float, initial: Tensor | None
) -> None:
    common.check_floating(drive=drive)
    common.check_floating_if_given(initial=initial)
    if drive.dim() < 2:
        raise ArgumentError(f"drive has shape {list(drive.shape)}; valid: [B, T, ...]")
    for name, value in (("threshold", threshold), ("surrogate_beta", surrogate_beta)):
        if not common.is_number(value) or not 0 < value < math.inf:
            raise ArgumentError(f"{name}={value!r} is not valid; give a number > 0")
    if not common.is_number(decay) or not 0 <= decay <= 1:
        raise ArgumentError(f"decay={decay!r} is not valid; give a number in [0, 1]")
    expected = (drive.shape[0], *drive.shape[2:])
    if initial is not None and tuple(initial.shape) != expected:
        raise ArgumentError(f"initial has shape {list(initial.shape)}; valid: [B, ...] = {list(expected)}")
    common.check_same_device(drive=drive, initial=initial)
