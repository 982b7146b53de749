"""Convolutions, but for their workspaces and the layout of their results (convolution/workspaces.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.prediction.ops.registry import flops, op
from oomph.prediction.ops.rules import Flops
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

op("convolution.default", same_dtype=("input", "weight", "bias"))
op(
    "convolution.default convolution_backward.default",
    uses_cublas=lambda args: not torch.backends.cudnn.enabled,
)
op("convolution_backward", launches=4)


@flops(aten.convolution.default)
def _convolution(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    input, weight, transposed = args[0], args[1], args[6]
    return _convolved(input if transposed else out, weight, 1)


@flops(aten.convolution_backward.default)
def _convolution_backward(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Flops:
    gradient, input, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return _convolved(input if transposed else gradient, weight, int(wanted[0]) + int(wanted[1]))


def _convolved(places: Tensor, weight: Tensor, times: int) -> Flops:
    """Every weight once at each place of the result (of the input, where the convolution is transposed)."""
    positions = places.numel() // max(places.shape[1], 1)
    kind = "depthwise convolution" if weight.shape[1] == 1 else "convolution"
    return Flops(2.0 * positions * weight.numel() * times, weight.dtype, kind)
