"""cuBLAS and cuDNN: workspaces, products in a wider dtype than their factors, and recurrent layers.

cuBLAS keeps its workspaces. Convolutions take one workspace per pass, freed when the pass is over. cuDNN's
heuristics choose the algorithm. Where the library is installed without a GPU, it is asked (cudnn.py). Else, a
convolution of NCHW tensors with a stride of 1 or 2 is taken to use the algorithm of the most similar one of
24,596 that were measured on an H200 (convolutions_h200.csv.gz: torch 2.11, cuDNN 9.19, TF32 on), and the
others follow rules found by measurements. The tensor-core kernels read NHWC with channels in multiples of 16
bytes, so tensors that are not so are copied into the workspace.

nn.LSTM, nn.GRU and nn.RNN dissolve into cells above the dispatch mode, so CUDA's path is taken at autograd's
key, as one op per call. A call makes what _cudnn_rnn makes on a GPU (ATen/native/cudnn/RNN.cpp): the results,
a workspace while it runs and a reserve kept for the backward pass, which in turn makes one flat gradient for
all weights.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from oomph.gpus import GPU
from oomph.prediction.allocator import round_up
from oomph.prediction.cuda import cudnn
from oomph.prediction.cuda.cudnn import Pass
from oomph.prediction.cuda.rules import (
    HOST_OUTPUTS,
    NEXT_RESULT,
    BoundArguments,
    CompositeRule,
    Estimated,
    Fake,
    RuleContext,
    Search,
    Temporary,
    aten_ops,
    bind,
    composite,
    contiguous_copy_bytes,
    cuda_kernel,
    temporaries,
    temporaries_of,
)
from oomph.torch_internals import OpOverload, disable_dispatch_modes, storage_id, suggest_memory_format
from oomph.units import MiB

aten = torch.ops.aten

# ----------------------------------------------------------------------------------------------------- cuBLAS


_CUBLAS_OPS = aten_ops("""
    mm.default addmm.default addmm_.default bmm.default baddbmm.default baddbmm_.default addbmm.default
    _addmm_activation.default mv.default addmv.default dot.default _euclidean_dist.default
    _scaled_mm.default mm.out addmm.out bmm.out
    linalg_inv_ex.default _linalg_solve_ex.default linalg_lu_solve.default linalg_solve_triangular.default
    linalg_pinv.atol_rtol_tensor linalg_lu.default linalg_lu_factor_ex.default linalg_matrix_exp.default
""")
_CUBLAS_OPS_IF_BATCHED = aten_ops("_linalg_slogdet.default _linalg_det.default")
_PRODUCTS_IN_WIDER_DTYPE = aten_ops("""
    mm.dtype mm.dtype_out addmm.dtype addmm.dtype_out bmm.dtype bmm.dtype_out baddbmm.dtype baddbmm.dtype_out
""")
_CONVOLUTIONS = aten_ops("convolution.default convolution_backward.default")
CALLS_CUBLAS = {
    *(_CUBLAS_OPS | _CUBLAS_OPS_IF_BATCHED | _PRODUCTS_IN_WIDER_DTYPE | _CONVOLUTIONS),
    aten._grouped_mm.default,
}  # or some of their calls
# cublasLt's own, beside cuBLAS's: the default of CUBLASLT_WORKSPACE_SIZE, as measured on an H200.
_CUBLASLT_BYTES = 1 << 20


class _Tracer(Protocol):
    gpu: Any

    def in_autograd_thread(self) -> bool: ...
    def stream(self) -> int: ...
    def record_workspace(self, size: int, op: str) -> Any: ...


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What CUBLAS_WORKSPACE_CONFIG asks for, sizes in KiB times numbers of them, or else torch's default:
    32 MiB on Hopper and later, about 8 MiB before (ATen/cuda/CublasHandlePool.cpp)."""
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return 1024 * sum(int(size) * int(number) for size, number in asked)
    return 32 << 20 if capability[0] >= 9 else (4096 * 2 + 16 * 8) * 1024


class CublasWorkspaces:
    """Allocated at the first call of cuBLAS by a thread on a stream, inside the caching allocator, and never
    freed."""

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer = tracer
        self._held: set[tuple[str, bool, int]] = set()

    def allocate(self, func: OpOverload, args: Sequence[Any]) -> None:
        """The workspaces that the op is the first of its thread and stream to need."""
        looped = func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16
        batched = func in _CUBLAS_OPS_IF_BATCHED and args[0].dim() > 2
        without_cudnn = func in _CONVOLUTIONS and not torch.backends.cudnn.enabled
        always = func in _CUBLAS_OPS or func in _PRODUCTS_IN_WIDER_DTYPE
        if not (looped or batched or without_cudnn or always):
            return
        if any(isinstance(arg, torch.Tensor) and not arg.numel() for arg in args):
            return  # nothing to multiply
        self._hold("cublas workspace", cublas_workspace_bytes(self._tracer.gpu.capability))
        if func in (aten.addmm.default, aten._addmm_activation.default):
            bias, left, right = args[:3]
            # A bias vector is added by cublasLt inside the product, not before it.
            if bias.dim() == 1 and bias.is_contiguous() and min(*left.shape, *right.shape) > 1:
                self._hold("cublasLt workspace", _CUBLASLT_BYTES)

    def _hold(self, name: str, size: int) -> None:
        key = name, self._tracer.in_autograd_thread(), self._tracer.stream()
        if key not in self._held:
            self._held.add(key)
            self._tracer.record_workspace(size, name)


@temporaries(
    *aten_ops("""
    mm.default addmm.default addmm_.default _addmm_activation.default bmm.default baddbmm.default
    baddbmm_.default
""")
)
def _copied_factors(call: BoundArguments, gpu: GPU) -> list[int]:
    """cuBLAS reads matrices whose rows or columns are dense. Others, such as the expanded gradient of a sum,
    are copied (native/cuda/Blas.cpp)."""
    first = 1 if "mat1" in call or "batch1" in call else 0  # after what is added
    factors: list[torch.Tensor] = list(call.values())[first : first + 2]
    return [one.nbytes for one in factors if not _has_dense_rows_or_columns(one)]


def _has_dense_rows_or_columns(matrices: torch.Tensor) -> bool:
    (rows, columns), (row, column) = matrices.shape[-2:], matrices.stride()[-2:]
    dense_rows, dense_columns = column == 1 and row >= columns, row == 1 and column >= rows
    return dense_rows or dense_columns or matrices.is_contiguous() or matrices.mT.is_contiguous()


@cuda_kernel(*_PRODUCTS_IN_WIDER_DTYPE)
def _product_in_wider_dtype(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Half-precision matrices with a float32 product: CUDA only, and torch cannot fake all of them."""
    if "out" in kwargs:
        return kwargs["out"]
    left, right, dtype = args[-3:]  # mm: left, right, dtype; addmm: added, left, right, dtype
    shape = [*left.shape[:-1], right.shape[-1]]
    return fake(aten.empty.memory_format, (shape,), {"dtype": dtype, "device": torch.device("cpu")})


@cuda_kernel(aten._grouped_mm.default)
def _grouped_product(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch fakes it for bfloat16 alone; CUDA multiplies group by group in the other dtypes (native/cuda/
    GroupedBlas.cpp). Rows of the result are aligned to 16 bytes."""
    call = bind(func, args, kwargs)
    left, right = call["self"], call["mat2"]
    if left.dtype not in (torch.float32, torch.float16) or left.dtype != right.dtype:
        return fake(func, args, kwargs)
    shape = [*left.shape[:-1], right.shape[-1]]
    if left.dim() == right.dim() == 2:
        shape = [call["offs"].shape[0], *shape]
    elif right.dim() == 2:
        shape = shape[1:]
    alignment = 16 // left.element_size()
    padded = [*shape[:-1], round_up(shape[-1], alignment)]
    out = fake(aten.empty.memory_format, (padded,), {"dtype": left.dtype, "device": torch.device("cpu")})
    return out if padded == shape else fake(aten.slice.Tensor, (out, -1, 0, shape[-1]), {})


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


def in_memory_format(fake: Fake, out: Any, format: torch.memory_format) -> Any:
    """The result in that memory format; None (a gradient that is not needed) stays None."""
    if out is None or out.is_contiguous(memory_format=format):
        return out
    return fake(aten.empty_like.default, (out,), {"memory_format": format})


# ---------------------------------------------------------------------------------- cuDNN: recurrent networks

_FLATTENED = (torch.float64, torch.float32, torch.float16)  # what nn.RNNBase keeps in one buffer
_RECURRENT_OP = "aten._cudnn_rnn"
_DROPOUT_STATE = 2048 * 24  # bytes per multiprocessor: a random number generator for each thread


@dataclass(frozen=True)
class RecurrentCall:
    cell: str
    rows: int  # steps x batch; of a packed sequence, the live ones only
    batch: int
    packed: bool
    inputs: int
    hidden: int  # width of the cell
    result: int  # width of one direction's output: less than `hidden` where an LSTM projects
    layers: int
    directions: int
    dropout: bool
    train: bool
    swapped: bool  # the caller's tensors have the batch first
    weights: int  # elements of all of them
    dtype: torch.dtype

    @property
    def item(self) -> int:
        return self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Of one pass: every weight meets every row."""
        return 2.0 * self.rows * self.weights


def _recurrent(cell: str) -> CompositeRule:
    def run(context: RuleContext, given: BoundArguments) -> Any:
        if not torch.backends.cudnn.enabled:
            return NotImplemented
        input = given["input"] if "input" in given else given["data"]
        hidden = list(given["hx"]) if cell == "lstm" else [given["hx"]]
        if torch.is_autocast_enabled("cuda"):  # always to half, whatever autocast's own type is
            input, *hidden = (tensor.to(torch.float16) for tensor in (input, *hidden))
        call = _recurrent_call(cell, given, input, hidden)
        if call.dropout and not context.held:  # the dropout state, made at the first dropout
            size = context.gpu.multiprocessors * _DROPOUT_STATE
            context.held.append(input.detach().new_empty(size, dtype=torch.uint8))
        cell_state = hidden[1] if cell == "lstm" else None
        tensors = (input, hidden[0], cell_state, *given["params"])
        output, hy, cy = _CudnnRnn.apply(call, context, *tensors)
        return (output, hy, cy) if cell == "lstm" else (output, hy)

    return run


for _cell in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    composite(getattr(aten, _cell).input, getattr(aten, _cell).data)(_recurrent(_cell))


def flatten_parameters(on_gpu: Callable[[Any], bool]) -> Callable[[nn.RNNBase], None]:
    """CUDA's nn.RNNBase.flatten_parameters: every weight becomes a view of one buffer."""

    def flatten(module: nn.RNNBase) -> None:
        weights: list[Any] = module._flat_weights
        if len(weights) != len(module._flat_weights_names) or not all(map(on_gpu, weights)):
            return
        first = weights[0]
        if first.dtype not in _FLATTENED or any(weight.dtype != first.dtype for weight in weights):
            return
        with torch.no_grad():
            flat = first.new_zeros(sum(weight.numel() for weight in weights))
            for weight, part in zip(weights, _views(flat, weights), strict=True):
                weight.data = part

    return flatten


def _recurrent_call(
    cell: str, given: BoundArguments, input: Tensor, hidden: Sequence[Tensor]
) -> RecurrentCall:
    return RecurrentCall(
        cell=cell,
        rows=input.numel() // max(int(input.shape[-1]), 1),
        batch=max(int(hidden[0].shape[1]), 1),
        packed="batch_sizes" in given,
        inputs=int(input.shape[-1]),
        hidden=int(hidden[-1].shape[2]),
        result=int(hidden[0].shape[2]),
        layers=int(given["num_layers"]),
        directions=2 if given["bidirectional"] else 1,
        dropout=bool(given["train"]) and given["dropout"] > 0,
        train=bool(given["train"]),
        swapped=bool(given.get("batch_first")),
        weights=sum(weight.numel() for weight in given["params"]),
        dtype=input.dtype,
    )


def _views(flat: Tensor, weights: Sequence[Tensor]) -> Iterator[Tensor]:
    start = 0
    for weight in weights:
        yield flat[start : start + weight.numel()].view(weight.shape)
        start += weight.numel()


class _CudnnRnn(torch.autograd.Function):
    """The allocations of aten::_cudnn_rnn and its backward, in their order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        call: RecurrentCall,
        context: RuleContext,
        input: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        # Weights that autocast casts, or that are not in one buffer, are copied into one of this call's own.
        in_one_buffer = len({storage_id(weight.untyped_storage()) for weight in weights}) == 1
        ready = weights[0].dtype == input.dtype and in_one_buffer
        flat = None if ready else input.new_empty(call.weights)
        x = _steps_first(call, input)
        output = x.new_empty((*x.shape[:-1], call.directions * call.result))
        hy = torch.empty_like(hx)
        cy = torch.empty_like(cx) if cx is not None else None
        with context.workspace(workspace_bytes(call), _RECURRENT_OP):
            reserve = x.new_empty(reserve_bytes(call), dtype=torch.uint8) if call.train else None
        del x
        output = output.transpose(0, 1) if call.swapped else output
        ctx.call, ctx.context = call, context
        context.count_kernel(input, output, *weights, flops=call.flops, kind="recurrent")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, hx, cx, output, reserve, flat, *weights)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        def like_inputs() -> Any:
            saved = ctx.saved_tensors
            return None, None, *(t if t is None else torch.empty_like(t) for t in (*saved[:3], *saved[6:]))

        rule = functools.partial(_CudnnRnn.gradients, ctx, *grads)
        return ctx.context.guard.call("gradients", f"aten.{ctx.call.cell}", rule, like_inputs)

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor | None) -> Any:
        call: RecurrentCall = ctx.call
        input, hx, cx, output, _, _, *weights = ctx.saved_tensors
        made = [
            torch.zeros_like(like)
            for like, grad in zip((hx, cx), grads[1:], strict=True)
            if like is not None and grad is None
        ]
        x = _steps_first(call, input)
        dy = _steps_first(call, grads[0] if grads[0] is not None else torch.zeros_like(output))
        dx = torch.empty_like(x)
        dhx = torch.empty_like(hx)
        dcx = torch.empty_like(cx) if cx is not None else None
        with ctx.context.workspace(workspace_bytes(call, backward=True), _RECURRENT_OP):
            ctx.context.count_kernel(input, dx, *weights, flops=call.flops, kind="recurrent")
        del x, dy
        dweights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[5:]):
            x = _steps_first(call, input)
            flat = x.new_zeros(call.weights)
            with ctx.context.workspace(workspace_bytes(call, backward=True), _RECURRENT_OP):
                ctx.context.count_kernel(input, output, flat, flops=call.flops, kind="recurrent")
            del x
            # Under autocast the copies' backward makes float32 gradients, one by one.
            parts = zip(_views(flat, weights), weights, strict=True)
            dweights = [part.to(weight.dtype) for part, weight in parts]
        del made
        return None, None, dx.transpose(0, 1) if call.swapped else dx, dhx, dcx, *dweights


def _steps_first(call: RecurrentCall, tensor: Tensor) -> Tensor:
    """As cuDNN reads it: steps first and contiguous, a copy if it was not."""
    return (tensor.transpose(0, 1) if call.swapped else tensor).contiguous()


def reserve_bytes(call: RecurrentCall) -> int:
    """What the forward pass leaves for the backward pass; to the byte as measured, projections included."""
    one = call.rows * call.hidden * call.directions
    layer = one * {"lstm": 5, "gru": 6}.get(call.cell, 1)  # gates and states
    if call.result < call.hidden:
        layer += one + one * call.result // call.hidden  # the state before and after the projection
    between = call.layers - 1  # outputs of the inner layers, and one bit for each that dropout may drop
    masks = one * call.directions * between // 8 if call.dropout else 0
    return (layer * call.layers + one * between) * call.item + masks + 256


class _Cell(NamedTuple):
    """Coefficients of cuDNN's workspaces. Pairs are for one direction and for two."""

    gates: int
    persistent_width: tuple[int, int]  # widest cell that persistent kernels take, forward and backward
    persistent_rows: int  # states that training with persistent kernels takes more for each row
    # States for each sample and layer:
    inference: tuple[int, int]
    persistent_inference: tuple[int, int]
    training: tuple[int, int]
    packed: tuple[int, int]


_LSTM = _Cell(4, (192, 128), 12, (10, 24), (8, 18), (12, 26), (6, 16))
_GRU = _Cell(3, (192, 128), 14, (5, 14), (4, 10), (6, 14), (3, 10))
_RNN = _Cell(1, (384, 256), 9, (3, 10), (4, 10), (6, 14), (1, 6))
_CELLS = {"lstm": _LSTM, "gru": _GRU, "rnn_tanh": _RNN, "rnn_relu": _RNN}
_GATE_STEPS = 256  # one direction with standard kernels holds the gates of at most these steps


def workspace_bytes(call: RecurrentCall, backward: bool = False) -> int:
    """cuDNN 9.19's choice on an H200: to 0.1 % in 9,283 of 9,289 measured passes; of packed sequences and
    projections to 13 % in all 1,639 (recurrent_h200.csv)."""
    cell = _CELLS[call.cell]
    persistent = _is_persistent(call, cell, backward)
    projects = call.result < call.hidden
    above = (call.layers - 1) * call.result * (1 + call.directions)
    matrices = cell.gates * call.hidden * (call.result + call.inputs + above)
    matrices += call.hidden * call.result * call.layers if projects else 0
    if call.packed:
        states = _packed_states(call, cell)
    else:
        training = _training_states(call, cell, persistent) if call.train else 0
        states = max(_inference_states(call, cell, persistent), training)
    fixed = 8 * call.batch + 256 + 8 * MiB * call.layers * call.directions
    return (states + matrices * call.directions) * call.item + fixed


def _is_persistent(call: RecurrentCall, cell: _Cell, backward: bool) -> bool:
    """Whether the weights stay on the multiprocessors during all steps."""
    if call.packed or call.result < call.hidden or call.dtype not in (torch.float32, torch.float16):
        return False
    aligned = call.hidden % 128 == call.inputs % 128 == call.batch % 8 == 0
    single = call.layers == call.directions == 1 and call.cell != "gru"
    half = call.dtype == torch.float16 and aligned and call.hidden <= 1024 and call.batch <= 128
    return call.hidden <= cell.persistent_width[backward] or (single and half)


def _inference_states(call: RecurrentCall, cell: _Cell, persistent: bool) -> int:
    """Elements of gates, states and inputs that the forward pass without autograd takes."""
    one_direction = call.directions == 1
    if persistent:
        states, samples = (
            5 * cell.gates + 1 if one_direction else 6 * cell.gates + 6,
            cell.persistent_inference,
        )
    else:
        states, samples = cell.gates + 1 if one_direction else 2 * cell.gates + 6, cell.inference
    per_sample = samples[call.directions - 1] * call.layers
    if one_direction and not persistent:
        per_sample -= cell.gates * max(call.rows // call.batch - _GATE_STEPS, 0)
    if one_direction and call.dropout and cell.gates > 1:
        states += 1
    per_row = states * call.hidden + call.inputs
    per_row += call.result * call.directions if call.result < call.hidden else 0
    return call.rows * per_row + per_sample * call.hidden * call.batch


def _training_states(call: RecurrentCall, cell: _Cell, persistent: bool) -> int:
    """Elements that the backward pass takes; the forward pass before it reserves as many."""
    widest = call.directions**2 * max(call.hidden, call.inputs)
    states = 3 * call.directions + (cell.persistent_rows if persistent else 0)
    per_sample = cell.training[call.directions - 1] * call.layers
    if call.directions == 1 and not persistent:
        per_sample -= call.layers
        if call.layers > 1:  # layers run at the same time, each a block of steps behind the one below it
            steps = call.rows // call.batch
            block = next(
                (size for most, size in ((2, 32), (8, 16), (16, 8), (64, 4)) if call.batch <= most), 2
            )
            block = max(block, 8) if steps >= 128 else block
            per_sample -= max(steps - block * call.layers - max(block, 8), 0)
    elif call.layers > 1:
        states += call.directions
    per_row = states * call.hidden + 2 * call.inputs + widest
    return call.rows * per_row + per_sample * call.hidden * call.batch


def _packed_states(call: RecurrentCall, cell: _Cell) -> int:
    """Elements for sequences of several lengths: `rows` are the live ones."""
    widest = max(call.hidden, call.inputs)
    if call.directions == 1:
        states = cell.gates + (call.dropout and call.layers > 1)
        other = call.hidden + widest
    else:
        states = 2 * cell.gates + 4
        other = 4 * (call.hidden + widest) if call.layers > 1 else 2 * (call.hidden + call.inputs + widest)
    per_row = max(states * call.hidden, other if call.train else 0)
    return call.rows * per_row + cell.packed[call.directions - 1] * call.layers * call.hidden * call.batch


@cuda_kernel(aten._pack_padded_sequence.default)
def _pack_padded_sequence(
    fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The live rows of each step, end to end, and their number, which stays on the host as the lengths do."""
    given = bind(func, args, kwargs)
    input, lengths = given["input"], given["lengths"].tolist()
    batch_sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    shape = [sum(batch_sizes), *input.shape[2:]]
    data = fake(aten.new_empty.default, (input, shape), {})
    return data, torch.tensor(batch_sizes)


@composite(aten._pad_packed_sequence.default)
def _pad_packed_sequence(context: RuleContext, given: BoundArguments) -> tuple[Tensor, Tensor]:
    """A padded tensor filled run by run, and the lengths, on the host."""
    data, batch_sizes = given["data"], given["batch_sizes"].tolist()
    rest = data.shape[1:]
    padded = data.new_full(
        (max(len(batch_sizes), given["total_length"]), batch_sizes[0], *rest), given["padding_value"]
    )
    first_row = first_step = 0
    for batch, run in itertools.groupby(batch_sizes):
        steps = len(list(run))
        rows = data[first_row : first_row + steps * batch].view(steps, batch, *rest)
        padded[first_step : first_step + steps, :batch] = rows
        first_row, first_step = first_row + steps * batch, first_step + steps
    lengths = [sum(size > sample for size in batch_sizes) for sample in range(batch_sizes[0])]
    with disable_dispatch_modes():  # a real tensor: the program may read it
        on_host = torch.tensor(lengths)
    return padded.transpose(0, 1) if given["batch_first"] else padded, on_host


HOST_OUTPUTS[aten._pack_padded_sequence.default] = lambda call: frozenset({1})  # the batch sizes
