"""Convolutions: the workspaces that cuDNN takes, and the layout of the results.

A convolution takes one workspace per pass, freed when the pass is over. cuDNN's heuristics choose the
algorithm. Where the library is installed, it is asked without a GPU (cudnn.py). Else, one bound holds: what
tensor cores cannot read as it is is copied, and weight gradients hold parts of sums (`_estimate`). `_most` is
the largest that is known, nothing the least; intervals.py says how far towards these an interval reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from oomph.gpus import GPU
from oomph.prediction.allocator import round_up
from oomph.prediction.cuda import cudnn
from oomph.prediction.cuda.cudnn import Pass
from oomph.prediction.ops.registry import cuda_kernel, temporaries, temporaries_of
from oomph.prediction.ops.rules import (
    NEXT_RESULT,
    BoundArguments,
    Estimated,
    Fake,
    Search,
    Temporary,
    bind,
    contiguous_copy_bytes,
    in_memory_format,
)
from oomph.torch_internals import OpOverload, suggest_memory_format

aten = torch.ops.aten

_TILE = (128, 128)  # of a weight gradient, computed by one multiprocessor at a time
_LEAST_PART = 1024  # positions that a part of a split sum adds up
_COPY_EXTRA_BYTES = 16  # behind copies
_FOURIER_TILE = 32  # rows and columns that data gradients by Fourier transforms compute at a time
_PARTS_OF_DEPTHWISE = 8  # in which each sample's weight gradient is summed, in channels last
_NARROW_KERNEL = 5  # rows or columns: up to it, Fourier transforms are not the fastest algorithm
_GROUPS_AT_A_TIME = 8  # of Fourier transforms and Winograd's method


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


@temporaries(aten.convolution.default)
def _forward(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    format = memory_format(call["input"], call["weight"])
    found = _describe(call, _output_shape(call), format)
    kind: Pass = "data" if call["transposed"] else "forward"
    copies = (contiguous_copy_bytes(call[name], format) for name in ("input", "weight"))
    return [*copies, NEXT_RESULT, *_search(found, kind, gpu), _workspace(found, kind, gpu)]


@temporaries(aten.convolution_backward.default)
def _backward(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    format = memory_format(call["input"], call["weight"])
    gradient = call["grad_output"]
    found = _describe(call, tuple(gradient.shape), format)
    gradient_copy = contiguous_copy_bytes(gradient, format)
    sizes: list[Temporary] = [gradient_copy]
    if call["output_mask"][0]:
        kind: Pass = "forward" if call["transposed"] else "data"
        weight_copy, workspace = contiguous_copy_bytes(call["weight"], format), _workspace(found, kind, gpu)
        search = _search(found, kind, gpu)
        sizes += [NEXT_RESULT, weight_copy, *search, workspace, -workspace, -weight_copy]
    if call["output_mask"][1]:
        input_copy, workspace = contiguous_copy_bytes(call["input"], format), _workspace(found, "weight", gpu)
        search = _search(found, "weight", gpu)
        sizes += [input_copy, NEXT_RESULT, *search, workspace, -workspace, -input_copy]
    if call["output_mask"][2]:
        others = [dim for dim in range(gradient.dim()) if dim != 1]
        sums = temporaries_of(aten.sum.dim_IntList, (gradient, others), {}, gpu)
        sizes += [-gradient_copy, NEXT_RESULT, *sums]
    return sizes


def _workspace(found: _Convolution, kind: Pass, gpu: GPU) -> int:
    if not found.input.bytes or not found.output.bytes:  # torch does not call cuDNN
        return 0
    if not torch.backends.cudnn.enabled:  # torch's own kernels: the columns of one sample (im2col)
        columns = found.input.channels // found.groups * found.kernel * found.output.plane * found.item
        has_columns = found.kernel > 1 or found.is_strided
        return columns if has_columns and not found.depthwise else 0
    if found.depthwise and not _is_left_to_cudnn(found):
        return 0
    # Of 25 searches whose list begins with Fourier transforms, with such kernels, one took them.
    slow = torch.backends.cudnn.benchmark and max(found.kernel_size) <= _NARROW_KERNEL
    taken = cudnn.workspace(_conv_pass(found, kind), gpu, "fourier" if slow else None)
    if taken is not None:
        return _bytes_of(taken, found, kind, gpu)
    if kind != "weight" and (found.is_product or found.depthwise):  # 94 % take none
        return 0
    # Recorded with what it may take, even where none is expected.
    return Estimated(max(_estimate(found, kind, gpu), 1), _most(found, kind, gpu))


def _estimate(found: _Convolution, kind: Pass, gpu: GPU) -> int:
    """Where cuDNN cannot be asked: as tensor cores compute it. Without them, nothing. Of matrix products, one
    for each sample is added up in the weight's gradient, if those are less."""
    if found.depthwise or _is_without_tensor_cores(found, kind):
        return 0
    size = _readable_copies(found) + (_parts_of_sums(found, gpu) if kind == "weight" else 0)
    return min(size, found.batch * found.weight * 4) if found.is_product else size


def _most(found: _Convolution, kind: Pass, gpu: GPU) -> int:
    """Where cuDNN cannot be asked, the largest workspace that it may choose: copies, and parts of sums. It
    often takes Fourier transforms and Winograd's method where the tensor cores are not used, and rarely where
    they are."""
    if found.depthwise:  # copies, in which each channel is one of four
        return max(_copies(found), (2 + found.kernel_size[-1]) * found.input.bytes)
    sums = gpu.multiprocessors * math.prod(_TILE) * 4 if kind == "weight" else 0
    sizes = [_copies(found) + min(sums, 4 * found.weight * max(1, found.positions // _LEAST_PART))]
    if _is_without_tensor_cores(found, kind) and found.kernel > 1:
        conv_pass = _conv_pass(found, kind)
        algorithms = (algorithm for algorithm in _OF_GPU if cudnn.has(algorithm, conv_pass))
        sizes += [_bytes_of(algorithm, found, kind, gpu) for algorithm in algorithms]
    return max(sizes)


def _is_without_tensor_cores(found: _Convolution, kind: Pass) -> bool:
    """float32 that is not computed in TF32."""
    return found.dtype is torch.float32 and not _conv_pass(found, kind).tf32


def _readable_copies(found: _Convolution) -> int:
    """Input and output that tensor cores cannot read as they are, and the weight with them: they read NHWC
    with channels in multiples of 16 bytes."""
    aligned = 16 // found.item
    sides = [one for one in (found.input, found.output) if not found.channels_last or one.channels % aligned]
    return _copied(found, sides, weight=found.kernel > 1) if sides else 0


def _parts_of_sums(found: _Convolution, gpu: GPU) -> int:
    """Of a weight gradient that is split among the multiprocessors, in tiles of one size at most."""
    if found.groups > 1:
        return 0
    parts = cudnn.parts_of_sums(_conv_pass(found, "weight"), _TILE, (1, 1), gpu.multiprocessors)
    return parts * min(_TILE[0], found.output.channels) * min(_TILE[1], found.input.channels) * 4


def _search(found: _Convolution, kind: Pass, gpu: GPU) -> Iterator[Search]:
    """The workspaces of the algorithms that torch.backends.cudnn.benchmark tries. Where cuDNN cannot be
    asked, they are what the convolution takes without a search, and Fourier transforms: in float32, those are
    in 72 % (weight gradients) to 91 % (data gradients) of its lists where the card has them."""
    searches = torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark
    searches &= not found.depthwise or _is_left_to_cudnn(found)
    if not searches or not found.input.bytes * found.output.bytes:
        return
    conv_pass = _conv_pass(found, kind)
    tried = {_bytes_of(each, found, kind, gpu) for each in cudnn.workspaces(conv_pass, gpu) or ()}
    if not tried:
        tried |= {_workspace(found, kind, gpu), _copies(found)}
        if found.item == 4 and found.groups == 1:
            tried |= {
                _bytes_of(algorithm, found, kind, gpu)
                for algorithm in _OF_GPU
                if cudnn.has(algorithm, conv_pass) and (algorithm == "fourier" or kind == "weight")
            }
    yield Search((found, kind), tuple(sorted(tried)))


def _is_left_to_cudnn(found: _Convolution) -> bool:
    """Of depthwise convolutions, for most of which torch has kernels of its own, without workspace (ATen/
    native/Convolution.cpp)."""
    if found.channels_last:
        return True
    if found.dtype is not torch.float16 or len(found.image) > 2 or found.dilated:
        return False
    channels, (height, width) = found.input.channels, ((1, *found.image)[-2:])
    step, kernel = found.strides[-1], found.kernel_size[-1]
    if channels < 32 or (found.strides[0] != step and height != 1):
        return False
    if height == 1 and step == 1:
        return True
    if len({*found.kernel_size}) > 1 or kernel not in (1, 3, 5) or width < 7 or step > 2:
        return False
    if step == 1:
        return True
    if found.batch == 1:
        return kernel > 1 or width <= 28
    if kernel == 1:
        return found.batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)


def _bytes_of(taken: int | cudnn.Algorithm, found: _Convolution, kind: Pass, gpu: GPU) -> int:
    """Of what cuDNN states: a workspace, or an algorithm."""
    if taken == "direct":
        if kind != "weight" or not found.channels_last:
            return 0
        return _PARTS_OF_DEPTHWISE * found.batch * round_up(found.output.channels, 32) * found.kernel * 4
    if taken == "fourier":
        return _fourier(found, kind)
    if taken == "winograd":
        return _winograd(found, kind)
    if taken == "product":  # one for each sample; weight gradients are their sum
        if kind != "weight":
            return 0
        return _parts_of_sums(found, gpu) if found.channels_last else found.batch * found.weight * 4
    return taken


def _copies(found: _Convolution) -> int:
    """Copies of all three in NHWC, with channels filled up to a multiple of 16 bytes."""
    return _copied(found, (found.input, found.output), weight=True)


def _copied(found: _Convolution, sides: Sequence[_Side], weight: bool) -> int:
    aligned = 16 // found.item
    grown = max(side.padded(aligned) / side.bytes for side in sides)
    weights = math.ceil(found.weight * found.item * grown) if weight else 0
    return sum(side.padded(aligned) for side in sides) + weights + _COPY_EXTRA_BYTES


def _fourier(found: _Convolution, kind: Pass) -> int:
    """Spectra of whole planes, filled up to a power of two; data gradients are made of tiles of 32 x 32."""
    one = _one_group(found)
    if kind == "data":
        size = _fourier_in_tiles(one)
    else:
        spectrum = _spectrum(_longest_side(one))
        inputs, outputs = one.batch * one.input.channels, one.batch * one.output.channels
        weights = one.input.channels * one.output.channels
        if kind == "forward":
            size = 2 * spectrum * max(inputs + weights, outputs) + round_up(one.weight * 4, 16)
        else:
            size = 2 * spectrum * max(inputs + outputs, weights) + round_up(one.output.bytes, 16)
    in_groups = found.groups > 1 and found.batch > 1
    return _of_all_groups(size, one, found, found.stride == 1 and (found.channels_last or in_groups))


def _fourier_in_tiles(found: _Convolution) -> int:
    """With a stride, the convolution without one of the image whose positions at each offset from the stride
    are channels of their own. Image, weight and gradient are then copied."""
    channels, outside = found.input.channels, found.output.channels
    image, kernel, copied = found.image, found.kernel_size, 0
    if found.stride > 1:
        steps = found.strides
        channels, outside = round_up(channels * math.prod(steps), 8), round_up(outside, 8)
        padded = (size + -pad % step for size, pad, step in zip(kernel, found.padding, steps, strict=True))
        kernel = tuple(map(_ceil_div, padded, steps))
        image = tuple(map(_ceil_div, image, steps))
        padding = map(_ceil_div, found.padding, steps)
        gradient = math.prod(map(lambda size, pad, width: size + 2 * pad - width + 1, image, padding, kernel))
        elements = channels * outside * math.prod(kernel)
        elements += found.batch * (channels * math.prod(image) + outside * gradient)
        copied = elements * found.item + _COPY_EXTRA_BYTES
    fits_tile = all(size + width - 1 <= _FOURIER_TILE for size, width in zip(image, kernel, strict=True))
    planes = found.batch * (channels + outside) * (1 if fits_tile else 2)
    return _spectrum(_FOURIER_TILE) * (channels * outside + planes) + copied


def _spectrum(side: int) -> int:
    """Bytes of the transform of a real plane of side x side elements."""
    return 8 * side * (side // 2 + 1)


def _longest_side(found: _Convolution) -> int:
    """Of the padded image, filled up to a power of two."""
    side = max(size + 2 * pad for size, pad in zip(found.image, found.padding, strict=True))
    return max(16, 1 << (side - 1).bit_length())


def _ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def _winograd(found: _Convolution, kind: Pass) -> int:
    """Tiles of 4 x 4 results, each transformed to 6 x 6 elements of input and output; of 9 x 9 results, to
    13 x 13, with kernels of 5 x 5. But for weight gradients of 3 x 3, tiles are of 16 samples."""
    one = _one_group(found)
    side, transformed = (4, 36) if one.kernel_size == (3, 3) else (9, 169)
    samples = one.batch if kind == "weight" and side == 4 else round_up(one.batch, 16)
    plane = one.image if kind == "data" else one.output_image
    tiles = samples * math.prod(_ceil_div(size, side) for size in plane)
    inside, outside = one.input.channels, one.output.channels
    size = 4 * transformed * (tiles * (inside + outside) + inside * outside)
    return _of_all_groups(round_up(size, 16), one, found, found.channels_last)


def _one_group(found: _Convolution) -> _Convolution:
    groups = found.groups
    sides = [
        side._replace(channels=side.channels // groups, bytes=side.bytes // groups) for side in found[1:3]
    ]
    return found._replace(input=sides[0], output=sides[1], weight=found.weight // groups, groups=1)


def _of_all_groups(size: int, one: _Convolution, found: _Convolution, copies: bool) -> int:
    """One group's workspace, with copies in NCHW or without, for as many groups as run at a time."""
    if copies:
        weight = one.weight * one.item if found.channels_last and one.kernel > 1 else 0
        size += one.input.bytes + one.output.bytes + weight + _COPY_EXTRA_BYTES
    return size * min(found.groups, _GROUPS_AT_A_TIME)


_OF_GPU: tuple[cudnn.Algorithm, ...] = "fourier", "winograd"


def _describe(call: BoundArguments, output: tuple[int, ...], format: torch.memory_format) -> _Convolution:
    """A transposed convolution is described as the convolution whose data gradient it computes."""
    input, weight = call["input"], call["weight"]
    batch, channels = input.shape[:2]
    item = input.element_size()
    sides = [_Side(s[1], math.prod(s[2:]), math.prod(s) * item) for s in (input.shape, output)]
    images = [tuple(s[2:]) for s in (input.shape, output)]
    return _Convolution(
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


def _conv_pass(found: _Convolution, kind: Pass) -> cudnn.ConvolutionPass:
    inside, outside = found.input.channels, found.output.channels
    return cudnn.ConvolutionPass(
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


def _output_shape(call: BoundArguments) -> tuple[int, ...]:
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


@cuda_kernel(aten.convolution.default, aten.convolution_backward.default)
def _convolution_results(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """cuDNN's layout. The fake kernel gives that of the backend which the *host* would take, and so follows
    its processor, its thread count and whether oneDNN is still on: torch turns oneDNN off for the whole
    process when a half-precision product fails on a processor without such instructions."""
    call = bind(func, args, kwargs)
    format = memory_format(call["input"], call["weight"])
    out = fake(func, args, kwargs)
    if isinstance(out, torch.Tensor):
        return in_memory_format(fake, out, format)
    input, weight, bias = out  # the gradients that were asked for
    return in_memory_format(fake, input, format), in_memory_format(fake, weight, format), bias
