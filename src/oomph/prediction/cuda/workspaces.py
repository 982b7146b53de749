"""Convolutions: the workspaces that cuDNN takes, and the layout of the results.

A convolution takes one workspace per pass, freed when the pass is over. cuDNN's
heuristics choose the algorithm. Where the library is installed without a GPU, it is asked (cudnn.py). Else, a
convolution of NCHW tensors with a stride of 1 or 2 is taken to use the algorithm of the most similar one of
24,596 that were measured on an H200 (convolutions_h200.csv.gz: torch 2.11, cuDNN 9.19, TF32 on), and the
others follow rules found by measurements. The tensor-core kernels read NHWC with channels in multiples of 16
bytes, so tensors that are not so are copied into the workspace.
"""

from __future__ import annotations

import functools
import gzip
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
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

# ---------------------------------------------------------------------------------------- cuDNN: convolutions

_TILE = 128  # rows and columns of a weight gradient that one multiprocessor computes at a time
_LEAST_PART = 1024  # positions that a part of a split weight gradient adds up
_LONG_SUM = 1 << 14  # with fewer positions, weight gradients in half precision are not split
_SHORT_SUM = {4: 76, 2: 32}  # with fewer products per output, convolutions do without tensor cores
_FEW_CHANNELS = 16
_DIRECT_WEIGHT_CHANNELS = 4  # with fewer, float32 weight gradients of short sums do without tensor cores
_NARROW_INPUT, _WIDE_OUTPUT = 64, 128  # channels: float32 convolutions from less to more copy no output
_LARGE_WEIGHT, _VERY_LARGE_WEIGHT = 1 << 16, 1 << 20  # elements
_STRIDED_WEIGHT = 1 << 11  # elements: below, gradients of strided 1x1 weights do without tensor cores
_SMALL_PLANE = 3  # positions: below, gradients of 1x1 weights take no workspace
_SMALL_KERNEL = 9  # positions: 3x3
_LARGE_KERNEL = 49  # positions: 7x7
_VERY_LARGE_KERNEL = 98  # positions: above, float32 data gradients copy their output in channels last, too
_COPY_EXTRA_BYTES, _SPLIT_EXTRA_BYTES = 16, 600  # bytes behind copies, and behind the parts of a split sum
_FOURIER_TILE = 32  # rows and columns that data gradients by Fourier transforms compute at a time
_PARTS_OF_DEPTHWISE = 8  # in which each sample's weight gradient is summed, in channels last
_NARROW_KERNEL = 5  # rows or columns: up to it, Fourier transforms are not the fastest algorithm
_GROUPS_AT_A_TIME = 8  # of Fourier transforms and Winograd's method
_DATA_MIN_BYTES = 131  # what a data gradient takes that copies nothing


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
    estimated = _estimate(found, kind, gpu)
    if _is_without_tensor_cores(found, kind):  # recorded with what it may take, even if none is expected
        estimated = max(estimated, 1)
    return Estimated(estimated, _most(found, kind, gpu))


def _estimate(found: _Convolution, kind: Pass, gpu: GPU) -> int:
    """Where cuDNN cannot be asked."""
    if found.depthwise:
        return _depthwise(found, kind)
    if _is_without_tensor_cores(found, kind):
        return _without_tensor_cores(found, kind)
    if not found.is_product and _is_like_measured(found):
        return _workspace_of_nearest(found, kind, gpu)
    if kind != "weight":
        as_it_is = found.is_product and (found.item != 4 or found.weight < _VERY_LARGE_WEIGHT)
        return 0 if as_it_is or _is_direct(found, kind) else _copies_inside(found, kind)
    if found.is_product and not found.channels_last:
        products, copies = found.batch * found.weight * 4, found.input.bytes + found.output.bytes
        if found.input.plane < _SMALL_PLANE:
            return 0
        if found.item == 4 and not (found.output.channels == 3 and len(found.image) == 2):  # as of RGB images
            sums = gpu.multiprocessors * _TILE * _TILE * 4
            return products if len(found.image) == 1 else min(products, copies + sums)
        if found.item != 4 and products <= 1.5 * copies:
            return products
    return 0 if _is_direct(found, kind) else _copies_inside(found, kind) + _partial_sums(found, gpu)


def _most(found: _Convolution, kind: Pass, gpu: GPU) -> int:
    """Where cuDNN cannot be asked, the largest workspace that it may choose. It often takes Fourier
    transforms and Winograd's method where the tensor cores are not used, and rarely where they are."""
    sizes = [_copies(found) + (_partial_sums(found, gpu) if kind == "weight" else 0)]
    if _is_without_tensor_cores(found, kind) and found.kernel > 1:
        conv_pass = _conv_pass(found, kind)
        algorithms = (algorithm for algorithm in _OF_GPU if cudnn.has(algorithm, conv_pass))
        sizes += [_bytes_of(algorithm, found, kind, gpu) for algorithm in algorithms]
    return max(sizes)


def _is_without_tensor_cores(found: _Convolution, kind: Pass) -> bool:
    """float32 that is not computed in TF32."""
    return found.dtype is torch.float32 and not _conv_pass(found, kind).tf32


def _without_tensor_cores(found: _Convolution, kind: Pass) -> int:
    """What cuDNN 9.19 chooses for most of 900 random passes: kernels that read NCHW as it is, or Winograd's
    method for weight gradients of many channels."""
    if kind != "weight":
        return _copies(found) if found.channels_last and found.kernel > 1 else 0
    has_many = min(found.input.channels, found.output.channels) >= _NARROW_INPUT
    return _winograd(found, kind) if has_many and cudnn.has("winograd", _conv_pass(found, kind)) else 0


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


def _is_direct(found: _Convolution, kind: Pass) -> bool:
    """Whether the kernel does without tensor cores and reads NCHW as it is."""
    is_short = found.kernel * found.input.channels // found.groups < _SHORT_SUM.get(found.item, 0)
    if found.channels_last:
        return False
    if found.item != 4:
        return kind == "forward" and found.kernel > 1 and is_short
    if found.kernel == 1:
        return found.is_strided and found.weight < (_STRIDED_WEIGHT if kind == "weight" else _LARGE_WEIGHT)
    if kind == "data":
        return found.input.channels < _FEW_CHANNELS
    return is_short and (kind == "forward" or found.input.channels < _DIRECT_WEIGHT_CHANNELS)


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


def _depthwise(found: _Convolution, kind: Pass) -> int:
    """Where cuDNN cannot be asked: copies for large kernels, in which each channel is one of four."""
    if kind == "weight" and found.item == 4 and found.kernel > _SMALL_KERNEL and found.stride == 1:
        return (2 + found.kernel_size[-1]) * found.input.bytes
    return 0


def _copies_inside(found: _Convolution, kind: Pass) -> int:
    """Input, output and weight as the kernels read them, where they are not so."""
    aligned = 16 // found.item
    channels = found.input.channels
    copied = not found.channels_last, not found.channels_last
    if found.item == 4 and found.kernel > 1:  # few channels and large kernels: float32 has other kernels
        few, large = channels < _FEW_CHANNELS, found.kernel >= _LARGE_KERNEL
        if not found.channels_last:
            widens = kind == "forward" and channels < _NARROW_INPUT and found.output.channels >= _WIDE_OUTPUT
            copied = True, not widens
        elif kind == "weight":
            copied = (few or large or found.groups > 1,) * 2
        elif kind == "data":
            copied = few, few or found.kernel > _VERY_LARGE_KERNEL
        else:
            copied = few or large, False
    both = zip((found.input, found.output), copied, strict=True)
    sides = [side for side, copy in both if copy or side.channels % aligned]
    if not sides:
        return _DATA_MIN_BYTES if kind == "data" else 0
    grown = max(side.padded(aligned) / side.bytes for side in sides)
    weight = 0 if found.kernel == 1 else math.ceil(found.weight * found.item * grown)
    return sum(side.padded(aligned) for side in sides) + weight + _COPY_EXTRA_BYTES


def _partial_sums(found: _Convolution, gpu: GPU) -> int:
    """A weight gradient split into as many parts as the multiprocessors can compute at once, in float32. A
    tile holds one position of the kernel, or two with few channels."""
    if found.item != 4 and found.positions < _LONG_SUM:
        return 0
    inside, outside = found.input.channels // found.groups, found.output.channels // found.groups
    half = _TILE // 2
    if found.kernel == 1:
        rows, columns, tiles = min(_TILE, outside), min(_TILE, inside), math.ceil(inside / _TILE)
    else:
        columns = half if max(inside, outside) <= half else _TILE
        rows = _TILE if outside > (half if inside > half else _TILE) else half
        tiles = math.ceil(found.kernel * math.ceil(inside / half) * half / columns)
    tiles *= math.ceil(outside / rows)
    parts = min(gpu.multiprocessors // tiles, found.positions // _LEAST_PART)
    if parts > 1:
        tiles *= parts
    elif found.kernel == _SMALL_KERNEL and found.positions >= 2 * _LEAST_PART:  # parts of tiles (stream-K)
        tiles = gpu.multiprocessors if tiles > gpu.multiprocessors else gpu.multiprocessors // 2
    else:
        return 0
    return tiles * rows * columns * 4 + _SPLIT_EXTRA_BYTES


class _Measured(NamedTuple):
    """A convolution of square images in NCHW, and the workspaces of its passes on an H200."""

    case: _Convolution
    workspaces: dict[Pass, int]
    position: tuple[float, ...]


_MEASURED_CAPABILITY, _MEASURED_MULTIPROCESSORS = (9, 0), 132  # of an H200
_LARGEST_MEASURED_BATCH = 256
_TOLERANCE = 700  # workspaces that differ by less are those of one algorithm


_Kernel = tuple[str, int, int]  # the dtype, the kernel's width, the stride


@functools.cache
def _measurements() -> dict[_Kernel, list[tuple[int, ...]]]:
    """Batch, channels of input and output, size of the image, and the workspaces of the passes."""
    found: dict[_Kernel, list[tuple[int, ...]]] = {}
    packed = (resources.files(__package__) / "convolutions_h200.csv.gz").read_bytes()
    for line in gzip.decompress(packed).decode().splitlines()[1:]:
        batch, inside, outside, width, stride, size, dtype, _, *workspaces = line.split(",")
        rows = found.setdefault((dtype, int(width), int(stride)), [])
        rows.append(tuple(map(int, (batch, inside, outside, size, *workspaces))))
    return found


@functools.cache
def _measured(kernel: _Kernel) -> list[_Measured]:
    name, width, stride = kernel
    dtype: torch.dtype = getattr(torch, name)
    item = dtype.itemsize
    found = []
    for batch, inside, outside, size, forward, data, weight in _measurements()[kernel]:
        padding = (width - 1) // 2
        side = (size + 2 * padding - width) // stride + 1
        planes = size**2, side**2
        case = _Convolution(
            batch=batch,
            input=_Side(inside, planes[0], item * batch * inside * planes[0]),
            output=_Side(outside, planes[1], item * batch * outside * planes[1]),
            weight=inside * outside * width**2,
            image=(size, size),
            output_image=(side, side),
            kernel_size=(width, width),
            strides=(stride, stride),
            padding=(padding, padding),
            dilation=(1, 1),
            dtype=dtype,
        )
        workspaces: dict[Pass, int] = {"forward": forward, "data": data, "weight": weight}
        found.append(_Measured(case, workspaces, _position(case)))
    return found


def _is_like_measured(found: _Convolution) -> bool:
    """Dilated ones are not: cuDNN has neither Fourier transforms nor Winograd's method for them."""
    is_plain = len(found.image) == 2 and not found.channels_last and not found.dilated and found.groups == 1
    is_square = len({*found.image}) == len({*found.kernel_size}) == 1
    return is_plain and is_square and found.stride <= 2 and found.item in (2, 4)


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
        return _partial_sums(found, gpu) if found.channels_last else found.batch * found.weight * 4
    return taken


def _position(found: _Convolution) -> tuple[float, ...]:
    """Logarithms of its sizes. That of positions, which decides most, counts twice."""
    positions = min(found.batch, _LARGEST_MEASURED_BATCH) * found.output.plane
    sizes = positions**2, found.output.plane, found.input.channels, found.output.channels
    return tuple(map(math.log2, sizes))


@functools.lru_cache(maxsize=4096)
def _nearest(found: _Convolution) -> _Measured:
    """The most similar measured convolution: its sizes differ by the smallest factors."""
    width, position = found.kernel_size[0], _position(found)

    def distance(kernel: _Kernel) -> tuple[int, int]:
        return abs(kernel[1] - width) + abs(kernel[2] - found.stride), kernel[1]

    dtype = "float32" if found.item == 4 else "bfloat16"
    # Those of 1 x 1 are matrix products, and like no others.
    alike = (kernel for kernel in _measurements() if kernel[0] == dtype and (kernel[1] == 1) == (width == 1))
    kernel = min(alike, key=distance)
    return min(_measured(kernel), key=functools.partial(_distance, position))


def _distance(position: tuple[float, ...], measured: _Measured) -> float:
    return sum(map(abs, map(operator.sub, measured.position, position)))


def _workspace_of_nearest(found: _Convolution, kind: Pass, gpu: GPU) -> int:
    """The workspace of the algorithm that the most similar measured convolution takes."""
    near = _nearest(found)
    measured = near.workspaces[kind]
    for algorithm in _OF_GPU:
        if not cudnn.has(algorithm, _conv_pass(near.case, kind)):
            continue
        if abs(_bytes_of(algorithm, near.case, kind, gpu) - measured) < _TOLERANCE:
            if cudnn.has(algorithm, _conv_pass(found, kind)):
                return _bytes_of(algorithm, found, kind, gpu)
            return _copies(found)
    for workspace in _ALGORITHMS:
        if abs(workspace(near.case) - measured) < _TOLERANCE:
            return workspace(found)
    beyond = measured - _copies(near.case)
    if beyond > 0:  # parts of a sum
        return _copies(found) + beyond * gpu.multiprocessors // _MEASURED_MULTIPROCESSORS
    sides = (side.input.bytes + side.output.bytes for side in (found, near.case))
    return round(measured * next(sides) / next(sides))


def _copies(found: _Convolution, input: bool = True, output: bool = True, weight: bool = True) -> int:
    """Copies in NHWC, with channels filled up to a multiple of 16 bytes."""
    aligned = 16 // found.item
    sides = [side for side, copied in ((found.input, input), (found.output, output)) if copied]
    grown = max(side.padded(aligned) / side.bytes for side in (found.input, found.output))
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
_ALGORITHMS: tuple[Callable[[_Convolution], int], ...] = (
    lambda found: 0,  # reads NCHW as it is
    _copies,
    lambda found: _copies(found, output=False),
    lambda found: _copies(found, input=False),
    lambda found: _copies(found, weight=False),
    lambda found: _copies(found, output=False, weight=False),
    lambda found: _copies(found, input=False, weight=False),
)


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
