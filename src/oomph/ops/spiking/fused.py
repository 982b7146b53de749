"""The gate as one kernel forward and one backward: a program walks through time with a block of channels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.spiking.problem import Backward, Forward, Neuron, wide_dtype

KERNELS = Kernels("oomph.ops.spiking.triton")


@dataclass(frozen=True)
class Tile:
    channels: int
    steps: int  # loaded before the first of them is needed, so that their latencies overlap
    warps: int


# Picked among three on an H200 that other programs used at the same time: a rough choice.
FORWARD_TILE = Tile(channels=32, steps=16, warps=1)
BACKWARD_TILE = Tile(channels=64, steps=16, warps=1)


def forward(
    drive_BTN: Tensor,
    decay_N: Tensor | None,
    initial_BN: Tensor | None,
    neuron: Neuron,
    keep_slope: bool,
    keep_before: bool,
) -> Forward:
    batch, tokens, channels = drive_BTN.shape
    wide = wide_dtype(drive_BTN.dtype)
    drive_BTN, tile = _readable(drive_BTN), FORWARD_TILE
    spikes_BTN = drive_BTN.new_empty(batch, tokens, channels)
    membrane_BN = drive_BTN.new_empty(batch, channels, dtype=wide)
    slope_BTN = torch.empty_like(spikes_BTN) if keep_slope else None
    before_BTN = torch.empty_like(spikes_BTN) if keep_before else None
    if membrane_BN.numel():
        KERNELS.launch(
            "lif_forward",
            (batch * -(-channels // tile.channels),),
            drive_BTN,
            spikes_BTN,
            slope_BTN,
            before_BTN,
            membrane_BN,
            None if initial_BN is None else initial_BN.contiguous(),
            decay_N,
            tokens,
            channels,
            drive_BTN.stride(0),
            drive_BTN.stride(1),
            neuron.decay,
            neuron.threshold,
            neuron.surrogate_beta,
            HAS_INITIAL=initial_BN is not None,
            HAS_DECAY=decay_N is not None,
            KEEP_SLOPE=keep_slope,
            KEEP_BEFORE=keep_before,
            **_constants(wide, tile),
        )
    return Forward(spikes_BTN, membrane_BN, slope_BTN, before_BTN)


def backward(
    slope_BTN: Tensor,
    before_BTN: Tensor | None,
    decay_N: Tensor | None,
    grad_spikes_BTN: Tensor | None,
    grad_membrane_BN: Tensor | None,
    neuron: Neuron,
) -> Backward:
    batch, tokens, channels = slope_BTN.shape
    wide = wide_dtype(slope_BTN.dtype)
    grad_spikes_BTN = None if grad_spikes_BTN is None else _readable(grad_spikes_BTN)
    tile = BACKWARD_TILE
    grad_drive_BTN = torch.empty_like(slope_BTN)
    grad_initial_BN = slope_BTN.new_empty(batch, channels, dtype=wide)
    grad_decay_BN = None if before_BTN is None else torch.empty_like(grad_initial_BN)
    if grad_initial_BN.numel():
        KERNELS.launch(
            "lif_backward",
            (batch * -(-channels // tile.channels),),
            slope_BTN,
            before_BTN,
            decay_N,
            grad_spikes_BTN,
            None if grad_membrane_BN is None else grad_membrane_BN.contiguous(),
            grad_drive_BTN,
            grad_initial_BN,
            grad_decay_BN,
            tokens,
            channels,
            0 if grad_spikes_BTN is None else grad_spikes_BTN.stride(0),
            0 if grad_spikes_BTN is None else grad_spikes_BTN.stride(1),
            neuron.decay,
            neuron.threshold,
            neuron.surrogate_beta,
            HAS_DECAY=decay_N is not None,
            HAS_GRAD_SPIKES=grad_spikes_BTN is not None,
            HAS_GRAD_MEMBRANE=grad_membrane_BN is not None,
            WANT_DECAY=before_BTN is not None,
            **_constants(wide, tile),
        )
    return Backward(grad_drive_BTN, grad_initial_BN, grad_decay_BN)


def _constants(wide: torch.dtype, tile: Tile) -> dict[str, Any]:
    return {
        "DOUBLE": wide == torch.float64,
        "BLOCK": tile.channels,
        "STEPS": tile.steps,
        "num_warps": tile.warps,
        # A fused multiply-add rounds once where torch rounds twice: channels near the threshold would fire
        # at other steps than on the CPU.
        "enable_fp_fusion": False,
    }


def _readable(x_BTN: Tensor) -> Tensor:
    """x itself where channels lie side by side; a sum's gradient is one number seen B x T x N times."""
    return x_BTN if x_BTN.stride(2) == 1 else x_BTN.contiguous()
