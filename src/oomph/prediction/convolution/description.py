"""A convolution, described as the one that cuDNN is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from oomph.prediction.convolution.cudnn import ConvolutionPass, Pass
from oomph.prediction.ops.rules import BoundArguments
from oomph.torch_internals import suggest_memory_format


class Side(NamedTuple):
    """The input or the output."""

    channels: int
    plane: int  # positions in one channel of one sample
    bytes: int

    def padded(self, multiple: int) -> int:
        """Bytes with the channels filled up to a multiple."""
        return self.bytes // self.channels * math.ceil(self.channels / multiple) * multiple


class Convolution(NamedTuple):
    batch: int
    input: Side
    output: Side
    weight: int  # elements
    image: tuple[int, ...]
    output_image: tuple[int, ...]
    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    dtype: torch.dtype
    groups: int = 1
    depthwise: bool = False
    channels_last: bool = False

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def dilated(self) -> bool:
        return any(step != 1 for step in self.dilation)

    @property
    def kernel(self) -> int:
        """Positions."""
        return math.prod(self.kernel_size)

    @property
    def stride(self) -> int:
        return max(self.strides)

    @property
    def is_product(self) -> bool:
        """A matrix product per sample, on the tensors as they are; the weight's gradient is their sum."""
        return self.kernel == 1 and not self.is_strided and self.groups == 1

    @property
    def is_strided(self) -> bool:
        """Or padded."""
        return self.stride != 1 or any(self.padding)

    @property
    def positions(self) -> int:
        """Products that are added up in one element of the weight's gradient."""
        return self.batch * self.output.plane


def describe(call: BoundArguments, output: tuple[int, ...], format: torch.memory_format) -> Convolution:
    """A transposed convolution is described as the convolution whose data gradient it computes."""
    input, weight = call["input"], call["weight"]
    batch, channels = input.shape[:2]
    item = input.element_size()
    sides = [Side(s[1], math.prod(s[2:]), math.prod(s) * item) for s in (input.shape, output)]
    images = [tuple(s[2:]) for s in (input.shape, output)]
    return Convolution(
        batch=batch,
        input=sides[call["transposed"]],
        output=sides[not call["transposed"]],
        weight=weight.numel(),
        image=images[call["transposed"]],
        output_image=images[not call["transposed"]],
        kernel_size=tuple(weight.shape[2:]),
        strides=_for_each(call["stride"], input),
        padding=_for_each(call["padding"], input),
        dilation=_for_each(call["dilation"], input),
        dtype=input.dtype,
        groups=call["groups"],
        depthwise=not call["transposed"] and call["groups"] == channels > 1,
        channels_last=format is not torch.contiguous_format,
    )


def pass_of(found: Convolution, kind: Pass) -> ConvolutionPass:
    inside, outside = found.input.channels, found.output.channels
    return ConvolutionPass(
        kind,
        input=(found.batch, inside, *found.image),
        weight=(outside, inside // found.groups, *found.kernel_size),
        output=(found.batch, outside, *found.output_image),
        stride=found.strides,
        padding=found.padding,
        dilation=found.dilation,
        dtype=found.dtype,
        channels_last=found.channels_last,
        deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        tf32=torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
    )


def _for_each(sizes: Sequence[int], input: torch.Tensor) -> tuple[int, ...]:
    """One number for all dimensions of space, or one for each."""
    return tuple(sizes) if len(sizes) > 1 else tuple(sizes) * (input.dim() - 2)


def memory_format(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Channels last if the input or the weight is; in float64 or one dimension never."""
    if input.dim() == 3 or torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    suggested = suggest_memory_format(input)
    return suggest_memory_format(weight) if suggested is torch.contiguous_format else suggested


def output_shape(call: BoundArguments) -> tuple[int, ...]:
    input, weight = call["input"], call["weight"]
    options = (_for_each(call[name], input) for name in ("stride", "padding", "dilation", "output_padding"))
    plane = []
    for size, width, step, pad, gap, more in zip(input.shape[2:], weight.shape[2:], *options, strict=True):
        reach = gap * (width - 1)
        if call["transposed"]:
            plane.append((size - 1) * step - 2 * pad + reach + more + 1)
        else:
            plane.append((size + 2 * pad - reach - 1) // step + 1)
    channels = weight.shape[1] * call["groups"] if call["transposed"] else weight.shape[0]
    return (input.shape[0], channels, *plane)
