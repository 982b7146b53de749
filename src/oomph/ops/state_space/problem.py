"""One form for every call: each tensor with a leading dimension of directions.

Legend: R directions (1 or 2), B batch, L tokens, d channels, n numbers of state per channel, c chunks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """What is differentiated. x has a leading 1 where both directions share it; z gates their sum."""

    x_RBLd: Tensor
    delta_RBLd: Tensor
    A_Rdn: Tensor
    B_RBLn: Tensor
    C_RBLn: Tensor
    D_Rd: Tensor | None
    z_BLd: Tensor | None
    bias_Rd: Tensor | None
    initial_RBdn: Tensor | None


class Gradients(NamedTuple):
    """Of Inputs, in the same order; None where not wanted."""

    x: Tensor | None
    delta: Tensor | None
    A: Tensor | None
    B: Tensor | None
    C: Tensor | None
    D: Tensor | None
    z: Tensor | None
    bias: Tensor | None
    initial: Tensor | None


class Wanted(NamedTuple):
    x: bool
    delta: bool
    A: bool
    B: bool
    C: bool
    D: bool
    z: bool
    bias: bool
    initial: bool


@dataclass(frozen=True)
class Options:
    # Direction 0 visits the tokens from the last to the first; direction 1 always does.
    first_is_leftward: bool
    softplus: bool
    chunk: int  # tokens between two states that are kept for backward
    keep_states: bool  # a backward may come
    keep_final: bool

    def leftward(self, way: int) -> bool:
        return way == 1 or self.first_is_leftward


@dataclass(frozen=True)
class Sizes:
    ways: int
    batch: int
    length: int
    d: int
    n: int
    chunks: int

    @staticmethod
    def of(inputs: Inputs, options: Options) -> "Sizes":
        ways, batch, length, d = inputs.delta_RBLd.shape
        return Sizes(ways, batch, length, d, inputs.A_Rdn.shape[2], -(-length // options.chunk))


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where any input is; else float32."""
    wide = any(each is not None and each.dtype == torch.float64 for each in tensors)
    return torch.float64 if wide else torch.float32


def of_way(tensor: Tensor | None, way: int) -> Tensor | None:
    """A direction's part; of a tensor that both share, that tensor."""
    return None if tensor is None else tensor[min(way, tensor.shape[0] - 1)]


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
