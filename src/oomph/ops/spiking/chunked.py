"""The gate in plain torch: a loop over time that holds a few MiB of it in float32.

Legend: B batch, T time, N channels, S the steps of one slice of time, which comes first so that a step is one
block of memory.
"""

import torch
from torch import Tensor

from oomph.ops.spiking.problem import Backward, Forward, Neuron, wide_dtype
from oomph.units import MiB

_SLICE_BYTES = 4 * MiB


def forward(
    drive_BTN: Tensor,
    decay_N: Tensor | None,
    initial_BN: Tensor | None,
    neuron: Neuron,
    keep_slope: bool,
    keep_before: bool,
) -> Forward:
    wide = wide_dtype(drive_BTN.dtype)
    batch, tokens, channels = drive_BTN.shape
    membrane_BN = drive_BTN.new_zeros(batch, channels, dtype=wide)
    if initial_BN is not None:
        membrane_BN.copy_(initial_BN)
    decay = neuron.decay if decay_N is None else decay_N
    spikes_BTN = drive_BTN.new_empty(drive_BTN.shape)
    slope_BTN = torch.empty_like(spikes_BTN) if keep_slope else None
    before_BTN = torch.empty_like(spikes_BTN) if keep_before else None
    leaked_BN, fired_BN = torch.empty_like(membrane_BN), torch.empty_like(membrane_BN)
    steps = _steps(drive_BTN, wide)
    for start in range(0, tokens, steps):
        times = slice(start, start + steps)
        # Holds the drive at first, and then the membranes between integration and reset.
        charged_SBN = _time_first(drive_BTN[:, times], wide)
        for offset, charged_BN in enumerate(charged_SBN.unbind(0)):
            if before_BTN is not None:
                before_BTN[:, start + offset].copy_(membrane_BN)
            # One rounding per product and per sum, as in the kernel: so both fire at the same steps.
            torch.mul(membrane_BN, decay, out=leaked_BN)
            charged_BN.add_(leaked_BN)
            torch.gt(charged_BN, neuron.threshold, out=fired_BN)
            torch.sub(charged_BN, fired_BN, alpha=neuron.threshold, out=membrane_BN)
        # NaN fires as NaN: a fault must not look like silence.
        spikes_SBN = torch.where(charged_SBN.isnan(), charged_SBN, charged_SBN > neuron.threshold)
        spikes_BTN[:, times].copy_(spikes_SBN.transpose(0, 1))
        del spikes_SBN
        if slope_BTN is not None:
            slope_BTN[:, times].copy_(_slope_(charged_SBN, neuron).transpose(0, 1))
    return Forward(spikes_BTN, membrane_BN, slope_BTN, before_BTN)


def backward(
    slope_BTN: Tensor,
    before_BTN: Tensor | None,
    decay_N: Tensor | None,
    grad_spikes_BTN: Tensor | None,
    grad_membrane_BN: Tensor | None,
    neuron: Neuron,
) -> Backward:
    wide = wide_dtype(slope_BTN.dtype)
    batch, tokens, channels = slope_BTN.shape
    decay = neuron.decay if decay_N is None else decay_N
    grad_BN = slope_BTN.new_zeros(batch, channels, dtype=wide)
    if grad_membrane_BN is not None:
        grad_BN.copy_(grad_membrane_BN)
    grad_drive_BTN = torch.empty_like(slope_BTN, memory_format=torch.contiguous_format)
    grad_decay_BN = None if before_BTN is None else torch.zeros_like(grad_BN)
    steps = _steps(slope_BTN, wide)
    for start in reversed(range(0, tokens, steps)):
        times = slice(start, start + steps)
        slope_SBN = _time_first(slope_BTN[:, times], wide).mul_(neuron.surrogate_beta)
        # Holds what spikes ask for at first, and then the gradients of the drive.
        grad_SBN = torch.zeros_like(slope_SBN)
        if grad_spikes_BTN is not None:
            grad_SBN.copy_(grad_spikes_BTN[:, times].transpose(0, 1)).mul_(slope_SBN)
        through_SBN = slope_SBN.mul_(-neuron.threshold).add_(1)
        for through_BN, now_BN in zip(
            reversed(through_SBN.unbind(0)), reversed(grad_SBN.unbind(0)), strict=True
        ):
            now_BN.addcmul_(through_BN, grad_BN)
            torch.mul(now_BN, decay, out=grad_BN)
        grad_drive_BTN[:, times].copy_(grad_SBN.transpose(0, 1))
        if before_BTN is not None and grad_decay_BN is not None:
            grad_decay_BN += grad_SBN.mul_(before_BTN[:, times].transpose(0, 1)).sum(0)
    return Backward(grad_drive_BTN, grad_BN, grad_decay_BN)


def _slope_(charged_SBN: Tensor, neuron: Neuron) -> Tensor:
    """sigmoid'(beta (m - threshold)), in the memory of m; exp never of a positive number."""
    exponent = charged_SBN.sub_(neuron.threshold).mul_(neuron.surrogate_beta).abs_().neg_()
    small = exponent.exp_()
    return small.div_((small + 1).square_())


def _time_first(x_BTN: Tensor, dtype: torch.dtype) -> Tensor:
    batch, steps, channels = x_BTN.shape
    return x_BTN.new_empty(steps, batch, channels, dtype=dtype).copy_(x_BTN.transpose(0, 1))


def _steps(x_BTN: Tensor, wide: torch.dtype) -> int:
    batch, tokens, channels = x_BTN.shape
    return max(1, min(tokens, _SLICE_BYTES // max(1, batch * channels * wide.itemsize)))
