"""What several modules share: dtypes, norms, initial values."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def head_norm(x_BTHD: Tensor, norm: nn.RMSNorm) -> Tensor:
    """`norm` of each head, its weight in x's dtype: torch does not fuse mixed dtypes, as under autocast."""
    return F.rms_norm(x_BTHD, list(norm.normalized_shape), norm.weight.to(x_BTHD.dtype), norm.eps)


@torch.no_grad()
def reset_step_bias(bias: Tensor) -> None:
    """Biases whose softplus, the step size of a decay, is log-uniform from 0.001 to 0.1."""
    # In at least float32: in half precision there would be a few dozen distinct steps.
    dtype = torch.promote_types(bias.dtype, torch.float32)
    step = torch.empty_like(bias, dtype=dtype).uniform_(math.log(0.001), math.log(0.1)).exp_()
    # softplus(b) = step for b = step + log(1 - exp(-step))
    bias.copy_(step + torch.log(-torch.expm1(-step)))
