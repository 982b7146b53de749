"""What the implementations of the gate are given, and what they give back.

Legend: B batch, T time, N channels (all trailing dimensions as one). "Wide" is float32, or float64 for it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Neuron:
    """The constants of the gate; `decay` is not read where there is a decay per channel."""

    decay: float
    threshold: float
    surrogate_beta: float


@dataclass(frozen=True, eq=False)
class Forward:
    """`slope` is sigmoid'(beta (m - threshold)), at most 1/4, and `before` the membrane that a step found.

    Both are [B, T, N] in the dtype of the drive, and None where no gradient will need them.
    """

    spikes_BTN: Tensor
    membrane_BN: Tensor
    slope_BTN: Tensor | None
    before_BTN: Tensor | None


@dataclass(frozen=True, eq=False)
class Backward:
    """`decay` is per sequence, to be summed over B; None where it is not wanted."""

    drive_BTN: Tensor
    initial_BN: Tensor
    decay_BN: Tensor | None


class Engine(Protocol):
    """chunked.py or fused.py."""

    def forward(
        self,
        drive_BTN: Tensor,
        decay_N: Tensor | None,
        initial_BN: Tensor | None,
        neuron: Neuron,
        keep_slope: bool,
        keep_before: bool,
    ) -> Forward: ...

    def backward(
        self,
        slope_BTN: Tensor,
        before_BTN: Tensor | None,
        decay_N: Tensor | None,
        grad_spikes_BTN: Tensor | None,
        grad_membrane_BN: Tensor | None,
        neuron: Neuron,
    ) -> Backward: ...


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
