"""What several modules share: states, checks, dtypes, norms, initial values."""

import dataclasses
import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.ops.common import wide_dtype


@dataclasses.dataclass(frozen=True, eq=False)
class RecurrentState:
    """Base class of the state of a layer after some tokens; its fields are tensors."""

    def detach(self) -> Self:
        """Detached tensors, for truncated backpropagation through time."""
        return type(self)(*(getattr(self, field.name).detach() for field in dataclasses.fields(self)))


def check_tokens(width: int, **tokens: Tensor) -> None:
    for name, x in tokens.items():
        if x.dim() != 3 or x.shape[-1] != width:
            raise ArgumentError(f"{name} has shape {list(x.shape)}; valid: [B, T, {width}]")


def wide(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider."""
    return x.to(wide_dtype(x.dtype))


def head_norm(x_BTHD: Tensor, norm: nn.RMSNorm) -> Tensor:
    """`norm` of each head, its weight in x's dtype: torch does not fuse mixed dtypes, as under autocast."""
    return F.rms_norm(x_BTHD, list(norm.normalized_shape), norm.weight.to(x_BTHD.dtype), norm.eps)


@torch.no_grad()
def reset_step_bias(bias: Tensor) -> None:
    """Biases whose softplus, the step size of a decay, is log-uniform from 0.001 to 0.1."""
    # In at least float32: in half precision there would be a few dozen distinct steps.
    step = torch.empty_like(bias, dtype=wide_dtype(bias.dtype))
    step.uniform_(math.log(0.001), math.log(0.1)).exp_()
    # softplus(b) = step for b = step + log(1 - exp(-step))
    bias.copy_(step + torch.log(-torch.expm1(-step)))
