"""The first step sizes of layers that forget by exp(-rate * softplus(... + bias))."""

import math

import torch
from torch import Tensor


@torch.no_grad()
def reset_step_bias(bias: Tensor, smallest: float, largest: float) -> None:
    """Biases whose softplus is spread evenly, in its logarithm, from the smallest to the largest step."""
    # In at least float32: steps made in half precision would be a few dozen distinct ones.
    wide = torch.promote_types(bias.dtype, torch.float32)
    step = torch.empty_like(bias, dtype=wide).uniform_(math.log(smallest), math.log(largest)).exp_()
    # softplus(b) = step for b = step + log(1 - exp(-step))
    bias.copy_(step + torch.log(-torch.expm1(-step)))
