"""Reductions, normalizations, softmax, roll and losses: results on CUDA, and what their kernels take besides.

Sources, in ATen's native/cuda: layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh,
Loss.cu, Col2Im.cu and Im2Col.cu; and native/Loss.cpp.

Staging memory of sum, mean, norm, var, max, any and their like: when a few outputs each gather many inputs,
several thread blocks share one output. They meet in a buffer in global memory, which is often many times as
large as the result. The arithmetic is that of ATen's native/cuda/Reduce.cuh (the block's shape, the split
over blocks) and native/TensorIterator.cpp (how dimensions are ordered, merged and cut for 32-bit indexing).
The figures come out exactly on an H200 with torch 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.cuda.rules import (
    BoundArguments,
    Fake,
    bind,
    contiguous_copy_bytes,
    cuda_kernel,
    temporaries,
)
from oomph.prediction.cuda.workspaces import in_memory_format
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_INT_MAX = 2**31 - 1
_WARP = 32
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_MAX_OUTPUT_VECTOR = 4


@dataclass(frozen=True)
class _Kernel:
    """The template parameters of one kernel that the arithmetic depends on."""

    accumulator: int  # bytes of a partial result
    input_vector: int = 4  # elements loaded at once when the reduced dimension is the fastest
    max_threads: int = 512


@dataclass(frozen=True)
class _Loop:
    """The dimensions as TensorIterator leaves them, the fastest first; strides in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # of the input
    out_strides: tuple[int, ...]  # 0 where the dimension is reduced
    offset: int = 0  # of the first element
    element: int = 4  # bytes

    @property
    def n_reduced(self) -> int:
        return sum(stride == 0 for stride in self.out_strides)

    @property
    def outputs(self) -> int:
        return math.prod(size for size, stride in zip(self.sizes, self.out_strides, strict=True) if stride)

    def fits_32_bits(self, out_element: int) -> bool:
        spans = [self._span(self.strides, self.element), self._span(self.out_strides, out_element)]
        return math.prod(self.sizes) <= _INT_MAX and max(spans) <= _INT_MAX

    def _span(self, strides: Sequence[int], element: int) -> int:
        return 1 + sum(
            (size - 1) * stride * element for size, stride in zip(self.sizes, strides, strict=True)
        )


def reduction_buffers(
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Sequence[int] | None,
    dtype: torch.dtype,
    gpu: GPU,
    *,
    offset: int = 0,
    accumulator: int | None = None,
    input_vector: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[int]:
    """What reducing `dims` (all when None or empty) of such a tensor allocates besides the result.

    Sizes as the table TEMPORARIES has them. The defaults are those of a sum: `accumulator` is the size of a
    partial result in bytes, `input_vector` the elements that a thread loads at once.
    """
    if accumulator is None:
        accumulator = 4 if dtype in _HALF else dtype.itemsize
    if input_vector is None:
        input_vector = 8 if dtype in _HALF else 4
    if not shape or 0 in shape:
        return []
    kernel = _Kernel(accumulator, input_vector, 256 if dtype is torch.complex128 else 512)
    loop = replace(_loop_of(shape, strides, dims), offset=offset, element=dtype.itemsize)
    out_element = (out_dtype or dtype).itemsize
    if loop.fits_32_bits(out_element):
        return _staging(loop, kernel, gpu)
    # Half precision is not accumulated in the result from one part to the next, but in a copy of its own.
    events = [loop.outputs * accumulator] if dtype in _HALF and out_dtype in (None, dtype) else []
    for part in _parts(loop, out_element, set()):
        buffers = _staging(part, kernel, gpu)
        events += [*buffers, *(-size for size in buffers)]
    return events


def iteration_order(
    shape: Sequence[int], strides: Sequence[Sequence[int]], reduced: Collection[int] = ()
) -> list[int]:
    """TensorIterator's order of dimensions, innermost first: reduced ones, then by the operands' strides."""

    def compare(first: int, second: int) -> int:
        if (first in reduced) != (second in reduced):
            return -1 if first in reduced else 1
        for each in strides:
            a, b = each[first], each[second]
            if a == 0 or b == 0:
                continue
            if a != b:
                return -1 if a < b else 1
            if shape[first] > shape[second]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for start in range(
        1, len(shape)
    ):  # ties are passed over and may be swapped across, as TensorIterator does
        place = start
        for other in reversed(range(start)):
            found = compare(order[other], order[place])
            if found > 0:
                order[other], order[place] = order[place], order[other]
                place = other
            elif found < 0:
                break
    return order


def _loop_of(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int] | None) -> _Loop:
    """TensorIterator's order: reduced dimensions first, then by stride; neighbours merged if they can be."""
    count = len(shape)
    reduced = {dim % count for dim in dims} if dims else set(range(count))
    out_strides = [0] * count
    step = 1
    for dim in reversed(range(count)):
        if dim not in reduced:
            out_strides[dim] = step
            step *= shape[dim]

    order = iteration_order(shape, (out_strides, strides), reduced)
    merged: list[list[int]] = []
    for dim in order:
        now = [shape[dim], strides[dim], out_strides[dim]]
        last = merged[-1] if merged else None
        if last is not None and last[0] == 1:
            merged[-1] = now
        elif last is not None and (now[0] == 1 or (last[0] * last[1], last[0] * last[2]) == (now[1], now[2])):
            last[0] *= now[0]
        else:
            merged.append(now)
    sizes, in_strides, outs = zip(*merged, strict=True)
    return _Loop(sizes, in_strides, outs)


def _parts(loop: _Loop, out_element: int, seen: set[_Loop]) -> Iterator[_Loop]:
    """Halve the widest dimension until each part's offsets fit 32 bits. Equal parts, of which a huge tensor
    has thousands, come once: the buffers of the second are those that the first freed."""
    loop = replace(loop, offset=loop.offset % _MAX_OUTPUT_VECTOR)  # all that a kernel's choice depends on
    if loop in seen:
        return
    seen.add(loop)
    if loop.fits_32_bits(out_element):
        yield loop
        return
    reach = [
        (size - 1) * max(stride * loop.element, out * out_element)
        for size, stride, out in zip(loop.sizes, loop.strides, loop.out_strides, strict=True)
    ]
    widest = reach.index(max(reach))
    first = loop.sizes[widest] // 2
    for size, start in ((first, 0), (loop.sizes[widest] - first, first)):
        sizes = (*loop.sizes[:widest], size, *loop.sizes[widest + 1 :])
        half = replace(loop, sizes=sizes, offset=loop.offset + start * loop.strides[widest])
        yield from _parts(half, out_element, seen)


def _staging(loop: _Loop, kernel: _Kernel, gpu: GPU) -> list[int]:
    """The buffer and the semaphores, when the blocks of one output must meet in global memory."""
    outputs = loop.outputs
    inputs = math.prod(loop.sizes) // outputs
    n_reduced = loop.n_reduced
    along_input = n_reduced == len(loop.sizes) or loop.strides[0] < loop.strides[n_reduced]
    width, height = (inputs, outputs) if along_input else (outputs, inputs)
    fastest = loop.strides[0 if along_input else n_reduced]
    vector = 1
    if fastest == 1:
        if along_input and width >= 128 and n_reduced == 1:
            width //= kernel.input_vector
        elif not along_input:
            vector = _output_vector(loop)
            width //= vector

    max_threads = kernel.max_threads // vector
    widest, highest = _power_of_two(width, max_threads), _power_of_two(height, max_threads)
    block_width = min(widest, _WARP)
    block_height = min(highest, max_threads // block_width)
    block_width = min(widest, max_threads // block_height)

    input_step = block_width if along_input else 1
    output_step = 1 if along_input else block_width
    if math.ceil(inputs / input_step) < min(block_height * 16, _MAX_VALUES_PER_THREAD):
        return []  # each row of a block has outputs of its own
    input_step *= block_height

    per_thread = math.ceil(inputs / input_step)
    grid = math.ceil(outputs // vector / output_step)
    wanted = gpu.multiprocessors * (_threads_per_multiprocessor(gpu) // (block_width * block_height))
    if per_thread < _MAX_VALUES_PER_THREAD or grid > wanted:
        return []
    blocks = max(
        min(math.ceil(wanted / grid), math.ceil(per_thread / _MIN_VALUES_PER_THREAD)),
        math.ceil(per_thread / _MAX_VALUES_PER_THREAD),
    )
    if blocks <= 1:
        return []
    # Counted per output and again per lane, though a lane has outputs of its own: so it is allocated.
    lanes = 1 if along_input else block_width * vector
    return [kernel.accumulator * outputs * blocks * lanes, 4 * grid]


def _output_vector(loop: _Loop) -> int:
    """How many neighbouring outputs a thread takes: 4, 2 or 1, as alignment allows."""
    vector = _MAX_OUTPUT_VECTOR
    others = [stride for dim, stride in enumerate(loop.strides) if dim != loop.n_reduced]
    for number in (loop.offset, loop.sizes[loop.n_reduced], *others):
        while number % vector:
            vector //= 2
    return vector


def _power_of_two(value: int, limit: int) -> int:
    """The largest power of two that is no larger, capped."""
    return 1 << (value.bit_length() - 1) if 0 < value < limit else limit if value else 1


def _threads_per_multiprocessor(gpu: GPU) -> int:
    if gpu.capability == (7, 5):
        return 1024
    return 1536 if gpu.capability in ((8, 6), (8, 9), (12, 0), (12, 1)) else 2048


# The ops


def _dims(call: BoundArguments) -> list[int] | None:
    dim = call.get("dim")
    return [dim] if isinstance(dim, int) else dim


def _reduce(tensor: Tensor, dims: Sequence[int] | None, gpu: GPU, **kernel: Any) -> list[int]:
    return reduction_buffers(
        tensor.shape, tensor.stride(), dims, tensor.dtype, gpu, offset=_offset(tensor), **kernel
    )


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> tuple[tuple[int, ...], list[int]]:
    """Strides of a fresh copy, and its bytes as an allocation."""
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides), [tensor.numel() * dtype.itemsize]


def _cast(
    tensor: Tensor, wanted: torch.dtype, gpu: GPU, dims: Sequence[int] | None, **kernel: Any
) -> list[int]:
    """Reduce into `wanted`. Half precision becomes float32 within the kernel; any other change is a copy."""
    if wanted == tensor.dtype or (wanted == torch.float32 and tensor.dtype in _HALF):
        return _reduce(tensor, dims, gpu, out_dtype=wanted, **kernel)
    copy = [tensor.numel() * wanted.itemsize]
    return copy + reduction_buffers(tensor.shape, tensor.stride(), dims, wanted, gpu, **kernel)


@temporaries(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.nansum.default)
def _sum(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    wanted = call["dtype"] or (torch.int64 if whole else tensor.dtype)
    return _cast(tensor, wanted, gpu, _dims(call))


@temporaries(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count(call: BoundArguments, gpu: GPU) -> list[int]:
    """A mask, unless the input is one, then its sum as int64 (TensorAdvancedIndexing.cpp)."""
    tensor = call["self"]
    strides, cast = _contiguous(tensor, torch.int64)
    mask = 0 if tensor.dtype == torch.bool else tensor.numel()
    return [mask, *cast, *reduction_buffers(tensor.shape, strides, _dims(call), torch.int64, gpu)]


@temporaries(aten.logsumexp.default)
def _logsumexp(call: BoundArguments, gpu: GPU) -> list[int]:
    """The maxima, exp(x - maximum) of every element, and its sum."""
    tensor, dims = call["self"], _dims(call)
    reduced = {dim % tensor.dim() for dim in dims} if dims and tensor.dim() else set(range(tensor.dim()))
    rows = math.prod(size for dim, size in enumerate(tensor.shape) if dim not in reduced)
    peaks = _reduce(tensor, dims, gpu, accumulator=tensor.dtype.itemsize, input_vector=4)
    sums = reduction_buffers(tensor.shape, tensor.stride(), dims, tensor.dtype, gpu)
    freed = [-size for size in peaks]
    return [rows * tensor.dtype.itemsize, *peaks, *freed, tensor.numel() * tensor.dtype.itemsize, *sums]


@temporaries(aten.prod.default, aten.prod.dim_int)
def _product(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    wanted = call["dtype"] or (torch.int64 if whole else tensor.dtype)
    return _cast(tensor, wanted, gpu, _dims(call), input_vector=4)


@temporaries(aten.linalg_vector_norm.default)
def _norm(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    return _cast(tensor, call["dtype"] or tensor.dtype, gpu, _dims(call), input_vector=4)


_CHUNK = 65536  # elements that one block of a foreach kernel takes


@temporaries(aten._foreach_norm.Scalar)
def _norms(call: BoundArguments, gpu: GPU) -> list[int]:
    """A partial result per chunk, as many for each tensor as the largest has."""
    tensors = call["self"]
    chunks = max((math.ceil(tensor.numel() / _CHUNK) for tensor in tensors), default=0)
    return [len(tensors) * chunks * max(4, tensors[0].dtype.itemsize)] if chunks else []


@temporaries(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _variance(call: BoundArguments, gpu: GPU) -> list[int]:
    """Welford: mean, sum of squares, and the count twice (as an int and as a float)."""
    tensor = call["self"]
    welford = 32 if tensor.dtype == torch.float64 else 16
    return _reduce(tensor, _dims(call), gpu, accumulator=welford, input_vector=2)


@temporaries(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)
def _extreme(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    return _reduce(tensor, _dims(call), gpu, accumulator=tensor.dtype.itemsize, input_vector=4)


@temporaries(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)
def _logic(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    size = tensor.dtype.itemsize
    return _reduce(tensor, _dims(call), gpu, accumulator=size, input_vector=4, out_dtype=torch.bool)


@temporaries(aten.aminmax.default)
def _extremes(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    return _reduce(tensor, _dims(call), gpu, accumulator=2 * tensor.dtype.itemsize, input_vector=4)


_VALUE_AND_INDEX = 16  # padded to the index's alignment, whatever the value's type


@temporaries(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
def _extreme_with_index(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    copy: list[int] = []
    strides, offset = tensor.stride(), _offset(tensor)
    if call["dim"] is None and not tensor.is_contiguous():  # argmax without a dimension flattens
        strides, copy = _contiguous(tensor, tensor.dtype)
        offset = 0
    return copy + reduction_buffers(
        tensor.shape, strides, _dims(call), tensor.dtype, gpu,
        offset=offset, accumulator=_VALUE_AND_INDEX, input_vector=4, out_dtype=torch.int64,
    )  # fmt: skip


# ---------------------------------------------------------------------- normalizations, softmax, roll, losses

_LONG = 64 * 1024  # rows
_ROWS_PER_BLOCK = 32
_GRID = 64 * 1024 // 2


@temporaries(aten.native_layer_norm.default)
def _layer_norm(call: BoundArguments, gpu: GPU) -> list[int]:
    return [contiguous_copy_bytes(call["input"]), contiguous_copy_bytes(call["weight"])]


@temporaries(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    given = zip((call["weight"], call["bias"]), call["output_mask"][1:], strict=True)
    parameters = [parameter for parameter, wanted in given if parameter is not None and wanted]
    copies = [contiguous_copy_bytes(call["grad_out"]), contiguous_copy_bytes(call["input"])]
    return copies + partial_sums(call["input"], math.prod(call["normalized_shape"]), parameters, gpu)


def partial_sums(tensor: Tensor, width: int, parameters: Sequence[Tensor], gpu: GPU) -> list[int]:
    """With many short rows, gradients of weight and bias are first summed over blocks of rows, then over the
    blocks. `width` is the length of a row. RMSNorm's backward does the same for its weight."""
    rows = tensor.numel() // max(width, 1)
    if rows <= _LONG or width // 32 >= gpu.multiprocessors // 2:
        return []
    blocks = min(_GRID // math.ceil(width / 32), math.ceil(rows / _ROWS_PER_BLOCK))
    events = [blocks * width * parameter.element_size() for parameter in parameters]
    for parameter in parameters:
        staging = reduction_buffers((blocks, width), (width, 1), [0], parameter.dtype, gpu)
        events += [width * parameter.element_size(), *staging, *(-size for size in staging)]
    return events


@temporaries(aten.native_group_norm.default)
def _group_norm(call: BoundArguments, gpu: GPU) -> list[int]:
    """A scale and a shift for each channel of each sample."""
    channels = call["N"] * call["C"] * max(call["input"].element_size(), 4)
    return [contiguous_copy_bytes(call["input"]), channels, channels]


@temporaries(aten.native_group_norm_backward.default)
def _group_norm_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """Sums per channel, and what they come to per group."""
    size = max(call["input"].element_size(), 4)
    channels, groups = call["N"] * call["C"] * size, call["N"] * call["group"] * size
    return [channels, channels, groups, groups, channels]


@temporaries(aten.native_batch_norm.default)
def _batch_norm(call: BoundArguments, gpu: GPU) -> list[int]:
    """Mean, variance and two counters of each block of rows, and a semaphore for each block of channels."""
    return _batch_norm_staging(call["input"], values=4)


@temporaries(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    return _batch_norm_staging(call["input"], values=2)


def _batch_norm_staging(tensor: Tensor, values: int) -> list[int]:
    """Rows are shared out over blocks where the channels lie next to each other, as in [N, C]."""
    if tensor.dim() != 2 or not tensor.is_contiguous():
        return []
    rows, channels = tensor.shape
    across = min(32, 1 << (channels.bit_length() - 1))
    down = min(1 << (math.ceil(rows / 16).bit_length() - 1), 512 // across)
    blocks = min(math.ceil(rows / (down * 16)), 128)
    if blocks < 8:
        return []
    return [values * channels * blocks * 4, math.ceil(channels / across) * 4]


@cuda_kernel(aten.native_layer_norm.default, aten.native_group_norm.default)
def _normalisation(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA's result is contiguous, and the mean and 1/std of half-precision inputs are kept in float32; the
    CPU's follow the input in both."""
    out, mean, rstd = fake(func, args, kwargs)
    out = in_memory_format(fake, out, torch.contiguous_format)
    if mean.dtype in (torch.bfloat16, torch.float16):
        mean, rstd = (
            fake(aten.empty_like.default, (kept,), {"dtype": torch.float32}) for kept in (mean, rstd)
        )
    return out, mean, rstd


# Softmax and roll read their input contiguously: a strided one is copied first.


@cuda_kernel(aten._softmax.default, aten._log_softmax.default, aten.roll.default)
def _contiguous_result(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA copies a strided input first and writes a contiguous result; the fake kernel keeps the strides."""
    return in_memory_format(fake, fake(func, args, kwargs), torch.contiguous_format)


@temporaries(aten.roll.default)
def _roll(call: BoundArguments, gpu: GPU) -> list[int]:
    """Several dimensions are rolled one after the other."""
    tensor = call["self"]
    between = tensor.numel() * tensor.element_size() if len(call["dims"]) > 1 else 0
    return [contiguous_copy_bytes(tensor), between]


@temporaries(aten._softmax.default, aten._log_softmax.default)
def _one_input(call: BoundArguments, gpu: GPU) -> list[int]:
    return [contiguous_copy_bytes(call["self"])]


# Results that CUDA makes large and then shrinks: they look small, and hold their first storage. mse and
# smooth_l1 take one element per element of the input until the mean is written, fold and unfold are as large
# as the input first.

_NO_REDUCTION = 0


def _shrunk(fake: Fake, elements: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of `shape` in a storage of so many elements, or of its own size if that is larger."""
    whole = fake(aten.empty.memory_format, ([elements],), {"dtype": dtype, "device": torch.device("cpu")})
    return fake(aten.resize_.default, (whole, list(shape)), {})


@cuda_kernel(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default)
def _loss(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = bind(func, args, kwargs)
    if call["reduction"] == _NO_REDUCTION:
        return fake(func, args, kwargs)
    shape, dtype = _elementwise(call)
    return _shrunk(fake, math.prod(shape), (), dtype)


@cuda_kernel(aten.col2im.default, aten.im2col.default)
def _fold(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    result = fake(func, args, kwargs)
    if args[0].numel() <= result.numel():
        return result
    return _shrunk(fake, args[0].numel(), result.shape, result.dtype)


def _elementwise(call: BoundArguments) -> tuple[torch.Size, torch.dtype]:
    given, target = call["self"], call["target"]
    return torch.broadcast_shapes(given.shape, target.shape), torch.promote_types(given.dtype, target.dtype)


def _reduced(call: BoundArguments, gpu: GPU) -> list[int]:
    shape, dtype = _elementwise(call)
    return reduction_buffers((math.prod(shape),), (1,), None, dtype, gpu)


@temporaries(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def _loss_of_every_element(call: BoundArguments, gpu: GPU) -> list[int]:
    if call["reduction"] == _NO_REDUCTION:
        return []
    shape, dtype = _elementwise(call)
    return [math.prod(shape) * dtype.itemsize, *_reduced(call, gpu)]


@temporaries(aten.binary_cross_entropy.default)
def _cross_entropy(call: BoundArguments, gpu: GPU) -> list[int]:
    """Written into the result itself, whose mean then replaces it."""
    if call["reduction"] == _NO_REDUCTION:
        return []
    return [call["self"].element_size(), *_reduced(call, gpu)]
