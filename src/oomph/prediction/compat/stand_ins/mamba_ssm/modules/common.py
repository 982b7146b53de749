"""What the modules share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def softplus_inverse(count: int, least: float, most: float, floor: float, made: dict[str, Any]) -> Tensor:
    """A bias whose softplus lies between two steps."""
    spread = torch.rand(count, **made) * (math.log(most) - math.log(least)) + math.log(least)
    steps = torch.exp(spread).clamp(min=floor)
    return steps + torch.log(-torch.expm1(-steps))


def check_training(inference_params: Any) -> None:
    if inference_params is not None:
        raise NotImplementedError("oomph's stand-in for mamba_ssm's modules takes no inference_params")
