"""Reductions: sum, mean, norm, variance, extremes, any and all.

When a few outputs each gather many inputs, several thread blocks share one output. They meet in a staging
buffer in global memory, which is often many times as large as the result. The arithmetic is that of
native/cuda/Reduce.cuh (the block's shape, the split over blocks) and native/TensorIterator.cpp (how
dimensions are ordered, merged and cut for 32-bit indexing), both in ATen.

The figures come out exactly as measured on an H200 with torch 2.11.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.ops.registry import op, temporaries
from oomph.prediction.ops.rules import HALF, BoundArguments, freed
from oomph.torch_internals import make_contiguous_strides_for

aten = torch.ops.aten

_INT_MAX = 2**31 - 1
_WARP = 32
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_MAX_OUTPUT_VECTOR = 4


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


@functools.lru_cache(maxsize=4096)
def reduction_buffers(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dims: tuple[int, ...] | None,
    dtype: torch.dtype,
    gpu: GPU,
    *,
    offset: int = 0,
    accumulator: int | None = None,
    input_vector: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[int]:
    """What reducing `dims` (all when None or empty) of such a tensor allocates in addition to the result.

    Sizes as the table TEMPORARIES has them. The defaults are those of a sum: `accumulator` is the size of a
    partial result in bytes, `input_vector` the elements that a thread loads at once where the reduced
    dimension is the fastest.
    """
    if accumulator is None:
        accumulator = 4 if dtype in HALF else dtype.itemsize
    if input_vector is None:
        input_vector = 8 if dtype in HALF else 4
    if not shape or 0 in shape:
        return []
    kernel = accumulator, input_vector, 256 if dtype is torch.complex128 else 512, gpu
    loop = replace(_loop_of(shape, strides, dims), offset=offset, element=dtype.itemsize)
    out_element = (out_dtype or dtype).itemsize
    if loop.fits_32_bits(out_element):
        return _staging(loop, *kernel)
    # Half precision is not accumulated in the result from one part to the next, but in a copy of its own.
    events = [loop.outputs * accumulator] if dtype in HALF and out_dtype in (None, dtype) else []
    for part in _parts(loop, out_element, set()):
        buffers = _staging(part, *kernel)
        events += [*buffers, *freed(buffers)]
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
    for start in range(1, len(shape)):  # ties are passed over and may be swapped across, as in TensorIterator
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


def _staging(loop: _Loop, accumulator: int, input_vector: int, most_threads: int, gpu: GPU) -> list[int]:
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
            width //= input_vector
        elif not along_input:
            vector = _output_vector(loop)
            width //= vector

    max_threads = most_threads // vector
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
    return [accumulator * outputs * blocks * lanes, 4 * grid]


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

op("sum.default sum.dim_IntList mean.dim", is_plain=True)
op("max.dim min.dim", chooses=1)
op("argmax.default argmin.default", chooses=0)


def _dims(call: BoundArguments) -> tuple[int, ...] | None:
    dim = call.get("dim")
    return (dim,) if isinstance(dim, int) else tuple(dim or ())


def reduce(tensor: Tensor, dims: tuple[int, ...] | None, gpu: GPU, **kernel: Any) -> list[int]:
    layout = tensor.shape, tensor.stride(), dims, tensor.dtype, gpu
    return reduction_buffers(*layout, offset=int(tensor.storage_offset()), **kernel)


def _cast(
    tensor: Tensor, wanted: torch.dtype, gpu: GPU, dims: tuple[int, ...] | None, **kernel: Any
) -> list[int]:
    """Reduce into `wanted`. Half precision becomes float32 within the kernel; any other change is a copy."""
    if wanted == tensor.dtype or (wanted == torch.float32 and tensor.dtype in HALF):
        return reduce(tensor, dims, gpu, out_dtype=wanted, **kernel)
    copy = [tensor.numel() * wanted.itemsize]
    return copy + reduction_buffers(tensor.shape, tensor.stride(), dims, wanted, gpu, **kernel)


def summed_dtype(call: BoundArguments) -> torch.dtype:
    """Whole numbers are summed as int64, unless the call names another type."""
    dtype: torch.dtype = call["self"].dtype
    return call["dtype"] or (dtype if dtype.is_floating_point or dtype.is_complex else torch.int64)


@temporaries(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.nansum.default)
def _sum(call: BoundArguments, gpu: GPU) -> list[int]:
    return _cast(call["self"], summed_dtype(call), gpu, _dims(call))


@temporaries(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count(call: BoundArguments, gpu: GPU) -> list[int]:
    """A mask, unless the input is one, then its sum as int64 (TensorAdvancedIndexing.cpp)."""
    tensor = call["self"]
    mask = 0 if tensor.dtype == torch.bool else tensor.numel()
    strides = make_contiguous_strides_for(tensor.shape)
    buffers = reduction_buffers(tensor.shape, strides, _dims(call), torch.int64, gpu)
    return [mask, tensor.numel() * torch.int64.itemsize, *buffers]


@temporaries(aten.logsumexp.default)
def _logsumexp(call: BoundArguments, gpu: GPU) -> list[int]:
    """The maxima, exp(x - maximum) of every element, and its sum."""
    tensor, dims = call["self"], _dims(call)
    reduced = {dim % tensor.dim() for dim in dims} if dims and tensor.dim() else set(range(tensor.dim()))
    rows = math.prod(size for dim, size in enumerate(tensor.shape) if dim not in reduced)
    peaks = reduce(tensor, dims, gpu, accumulator=tensor.dtype.itemsize, input_vector=4)
    sums = reduction_buffers(tensor.shape, tensor.stride(), dims, tensor.dtype, gpu)
    return [rows * tensor.dtype.itemsize, *peaks, *freed(peaks), tensor.nbytes, *sums]


@temporaries(aten.prod.default, aten.prod.dim_int, aten.linalg_vector_norm.default)
def _product(call: BoundArguments, gpu: GPU) -> list[int]:
    return _cast(call["self"], summed_dtype(call), gpu, _dims(call), input_vector=4)


_CHUNK = 65536  # elements that one block of a foreach kernel takes


@temporaries(aten._foreach_norm.Scalar)
def _norms(call: BoundArguments, gpu: GPU) -> list[int]:
    """A partial result per chunk, as many for each tensor as the largest has."""
    tensors = call["self"]
    chunks = max((math.ceil(tensor.numel() / _CHUNK) for tensor in tensors), default=0)
    return [len(tensors) * chunks * max(4, tensors[0].dtype.itemsize)] if chunks else []


WELFORD = 16  # bytes: mean, sum of squares, and the count twice (as an int and as a float)


@temporaries(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _variance(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    welford = 2 * WELFORD if tensor.dtype == torch.float64 else WELFORD
    return reduce(tensor, _dims(call), gpu, accumulator=welford, input_vector=2)


def _extreme(call: BoundArguments, gpu: GPU, values: int = 1, out_dtype: Any = None) -> list[int]:
    size = values * call["self"].dtype.itemsize
    return reduce(call["self"], _dims(call), gpu, accumulator=size, input_vector=4, out_dtype=out_dtype)


op("max.default min.default amax.default amin.default", temporaries=_extreme)
op("aminmax.default", temporaries=functools.partial(_extreme, values=2))
op(
    "any.default any.dim any.dims all.default all.dim all.dims",
    temporaries=functools.partial(_extreme, out_dtype=torch.bool),
)
_VALUE_AND_INDEX = 16  # padded to the index's alignment, whatever the value's type


@temporaries(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
def _extreme_with_index(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor, dims = call["self"], _dims(call)
    kernel = {"accumulator": _VALUE_AND_INDEX, "input_vector": 4, "out_dtype": torch.int64}
    if call["dim"] is not None or tensor.is_contiguous():
        return reduce(tensor, dims, gpu, **kernel)
    strides = make_contiguous_strides_for(tensor.shape)  # argmax without a dimension flattens
    return [tensor.nbytes, *reduction_buffers(tensor.shape, strides, dims, tensor.dtype, gpu, **kernel)]
