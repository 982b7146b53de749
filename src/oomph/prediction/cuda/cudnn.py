"""Workspaces of cuDNN's convolutions: one allocation per pass, freed when the pass is over.

cuDNN's heuristics choose the algorithm, and without a GPU they cannot be asked: these are estimates that
follow some 200 convolutions measured on an H200 (torch 2.11, cuDNN 9.19, TF32 on). The tensor-core kernels
read NHWC with channels in multiples of 16 bytes, so tensors that are not so are copied into the workspace.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch._prims_common import suggest_memory_format

from oomph.gpus import GPU
from oomph.prediction.cuda.temporaries import Bound, temporaries, temporaries_of

aten = torch.ops.aten
Pass = Literal["forward", "data", "weight"]

_TILE = 128  # rows and columns of a result that one multiprocessor computes at a time
_SHORT_SUM = 32  # with fewer products per output, float32 convolutions do without tensor cores
_LONG_SUM = 1 << 14  # with fewer positions, weight gradients are split in float32 with small kernels only
_SMALL_KERNEL = 9  # positions: 3x3


class _Side(NamedTuple):
    """The input or the output."""

    channels: int
    plane: int  # positions in one channel of one sample
    bytes: int

    def padded(self, multiple: int) -> int:
        """Bytes with the channels filled up to a multiple."""
        return self.bytes // self.channels * math.ceil(self.channels / multiple) * multiple


class _Convolution(NamedTuple):
    batch: int
    input: _Side
    output: _Side
    weight: int  # elements
    kernel: int  # positions
    width: int  # of the kernel
    item: int  # bytes of an element
    planar: bool  # two-dimensional
    strided: bool
    groups: int
    depthwise: bool
    channels_last: bool


@temporaries(aten.convolution.default)
def _forward(call: Bound, gpu: GPU) -> list[int]:
    format = memory_format(call["input"], call["weight"])
    found = _describe(call, _output_shape(call), format)
    return [*_copies(format, call["input"], call["weight"]), _workspace(found, "forward", gpu)]


@temporaries(aten.convolution_backward.default)
def _backward(call: Bound, gpu: GPU) -> list[int]:
    format = memory_format(call["input"], call["weight"])
    gradient = call["grad_output"]
    found = _describe(call, tuple(gradient.shape), format)
    sizes = _copies(format, gradient, call["input"], call["weight"])
    passes: tuple[Pass, Pass] = ("data", "weight")
    for kind, wanted in zip(passes, call["output_mask"], strict=False):
        if wanted:
            size = _workspace(found, kind, gpu)
            sizes += [size, -size]  # each pass frees its own before the next begins
    if call["output_mask"][2]:
        others = [dim for dim in range(gradient.dim()) if dim != 1]
        sizes += temporaries_of(aten.sum.dim_IntList, (gradient, others), {}, gpu)
    return sizes


def _workspace(found: _Convolution, kind: Pass, gpu: GPU) -> int:
    if found.depthwise:
        return _depthwise(found, kind)
    products = found.kernel * found.input.channels // found.groups
    if found.item == 4 and found.kernel > 1 and products < _SHORT_SUM:
        return 0
    sums = _partial_sums(found, gpu) if kind == "weight" else 0
    if found.kernel == 1 and not found.strided and found.input.plane % 4 == 0:
        # A matrix product per sample, on the tensors as they are; the weight's gradient is the sum of them.
        if kind != "weight":
            return 0
        ends = found.input.bytes + found.output.bytes
        if found.planar and not found.channels_last and _is_even(found):
            return min(found.batch * found.weight * 4, ends + sums)
    return _copies_inside(found, kind) + sums


def _depthwise(found: _Convolution, kind: Pass) -> int:
    """torch has kernels of its own, without workspace; cuDNN, for channels last, takes one in float32."""
    if kind == "weight" and found.channels_last and found.item == 4 and found.kernel > _SMALL_KERNEL:
        return (2 + found.width) * found.input.bytes
    return 0


def _copies_inside(found: _Convolution, kind: Pass) -> int:
    """Input, output and weight as the kernels read them, where they are not so."""
    aligned = 16 // found.item
    ready = found.channels_last
    if kind == "weight" and found.item == 4 and (found.groups > 1 or found.kernel > _SMALL_KERNEL):
        ready = False  # the float32 kernels for these read another layout
    sides = [side for side in (found.input, found.output) if not ready or side.channels % aligned]
    if not sides:
        return 0
    grown = max(side.padded(aligned) / side.bytes for side in sides)
    weight = 0 if found.kernel == 1 else math.ceil(found.weight * found.item * grown)
    return sum(side.padded(aligned) for side in sides) + weight


def _is_even(found: _Convolution) -> bool:
    """Whether the products of a weight gradient can read the planes as they are."""
    channels = (found.input.channels, found.output.channels)
    return found.input.plane % (16 // found.item) == 0 and all(count % 2 == 0 for count in channels)


def _partial_sums(found: _Convolution, gpu: GPU) -> int:
    """A weight gradient split among all multiprocessors: each keeps one tile of it in float32."""
    small = found.kernel <= _SMALL_KERNEL
    if found.batch * found.output.plane < _LONG_SUM and not (small and found.item == 4):
        return 0
    rows = min(_TILE, found.output.channels // found.groups)
    columns = min(_TILE, found.input.channels // found.groups * found.kernel)
    return gpu.multiprocessors * (1 if small else 2) * rows * columns * 4


def _describe(call: Bound, output: tuple[int, ...], format: torch.memory_format) -> _Convolution:
    input, weight = call["input"], call["weight"]
    batch, channels = input.shape[:2]
    item = input.element_size()
    return _Convolution(
        batch=batch,
        input=_Side(channels, math.prod(input.shape[2:]), input.numel() * item),
        output=_Side(output[1], math.prod(output[2:]), math.prod(output) * item),
        weight=weight.numel(),
        kernel=math.prod(weight.shape[2:]),
        width=weight.shape[-1],
        item=item,
        planar=input.dim() == 4,
        strided=any(step != 1 for step in call["stride"]) or any(call["padding"]),
        groups=call["groups"],
        depthwise=not call["transposed"] and call["groups"] == channels > 1,
        channels_last=format is not torch.contiguous_format,
    )


def memory_format(input: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Channels last if the input or the weight is; in float64 or one dimension never."""
    if input.dim() == 3 or torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    suggested = suggest_memory_format(input)
    return suggest_memory_format(weight) if suggested is torch.contiguous_format else suggested


def _copies(format: torch.memory_format, *tensors: torch.Tensor) -> list[int]:
    """Tensors in another layout than the convolution's are copied first."""
    return [t.numel() * t.element_size() for t in tensors if not t.is_contiguous(memory_format=format)]


def _output_shape(call: Bound) -> tuple[int, ...]:
    input, weight = call["input"], call["weight"]
    plane = []
    for axis, size in enumerate(input.shape[2:]):
        one = len(call["stride"]) == 1
        step, pad, gap, more = (
            call[name][0 if one else axis] for name in ("stride", "padding", "dilation", "output_padding")
        )
        reach = gap * (weight.shape[2 + axis] - 1)
        if call["transposed"]:
            plane.append((size - 1) * step - 2 * pad + reach + more + 1)
        else:
            plane.append((size + 2 * pad - reach - 1) // step + 1)
    channels = weight.shape[1] * call["groups"] if call["transposed"] else weight.shape[0]
    return (input.shape[0], channels, *plane)
