"""ATen's own CUDA kernels: results that differ from the CPU's, and memory that they take and no output shows.

Reductions, normalizations, softmax, roll and losses first. Sources, in ATen's native/cuda:
layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh, Loss.cu, Col2Im.cu and Im2Col.cu; and
native/Loss.cpp. Staging memory of sum, mean, norm, var, max, any and their like: when a few outputs each
gather many inputs, several thread blocks share one output. They meet in a buffer in global memory, which is
often many times as large as the result. The arithmetic is that of native/cuda/Reduce.cuh (the block's shape,
the split over blocks) and native/TensorIterator.cpp (how dimensions are ordered, merged and cut for 32-bit
indexing).

Then sorts, scans, look-ups, selections and scatters. Sources, in ATen's native/cuda: Embedding.cu,
EmbeddingBag.cu, EmbeddingBackwardKernel.cu, Sort.cpp, SortStable.cu, TensorTopK.cu, ScanUtils.cuh,
Indexing.cu, Nonzero.cu, IndexKernel.cpp, Unique.cu, UniqueCub.cu, SummaryOps.cu, MultinomialKernel.cu;
native/Repeat.h, native/Distributions.cpp; and CUB's radix sort, whose temporary holds alternate buffers for
keys and values and a little per tile. CUB's share per tile, at most 3 % of its temporary, is assumed to be
the same on other GPUs.

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
from oomph.prediction.allocator import round_up
from oomph.prediction.cuda.rules import (
    NEXT_RESULT,
    BoundArguments,
    Fake,
    TemporariesRule,
    Temporary,
    bind,
    contiguous_copy_bytes,
    cuda_kernel,
    temporaries,
)
from oomph.prediction.cuda.workspaces import in_memory_format
from oomph.torch_internals import OpOverload, make_contiguous_strides_for, suggest_memory_format

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_INT_MAX = 2**31 - 1
_WARP = 32
_MIN_VALUES_PER_THREAD = 16
_MAX_VALUES_PER_THREAD = 256
_MAX_OUTPUT_VECTOR = 4
_INDEX = 8  # bytes


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
        accumulator = 4 if dtype in _HALF else dtype.itemsize
    if input_vector is None:
        input_vector = 8 if dtype in _HALF else 4
    if not shape or 0 in shape:
        return []
    kernel = accumulator, input_vector, 256 if dtype is torch.complex128 else 512, gpu
    loop = replace(_loop_of(shape, strides, dims), offset=offset, element=dtype.itemsize)
    out_element = (out_dtype or dtype).itemsize
    if loop.fits_32_bits(out_element):
        return _staging(loop, *kernel)
    # Half precision is not accumulated in the result from one part to the next, but in a copy of its own.
    events = [loop.outputs * accumulator] if dtype in _HALF and out_dtype in (None, dtype) else []
    for part in _parts(loop, out_element, set()):
        buffers = _staging(part, *kernel)
        events += [*buffers, *_freed(buffers)]
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


def _freed(events: Sequence[int]) -> list[int]:
    return [-size for size in events]


# The ops


def _dims(call: BoundArguments) -> tuple[int, ...] | None:
    dim = call.get("dim")
    return (dim,) if isinstance(dim, int) else tuple(dim or ())


def _reduce(tensor: Tensor, dims: tuple[int, ...] | None, gpu: GPU, **kernel: Any) -> list[int]:
    layout = tensor.shape, tensor.stride(), dims, tensor.dtype, gpu
    return reduction_buffers(*layout, offset=int(tensor.storage_offset()), **kernel)


def _cast(
    tensor: Tensor, wanted: torch.dtype, gpu: GPU, dims: tuple[int, ...] | None, **kernel: Any
) -> list[int]:
    """Reduce into `wanted`. Half precision becomes float32 within the kernel; any other change is a copy."""
    if wanted == tensor.dtype or (wanted == torch.float32 and tensor.dtype in _HALF):
        return _reduce(tensor, dims, gpu, out_dtype=wanted, **kernel)
    copy = [tensor.numel() * wanted.itemsize]
    return copy + reduction_buffers(tensor.shape, tensor.stride(), dims, wanted, gpu, **kernel)


def _summed_dtype(call: BoundArguments) -> torch.dtype:
    """Whole numbers are summed as int64, unless the call names another type."""
    dtype: torch.dtype = call["self"].dtype
    return call["dtype"] or (dtype if dtype.is_floating_point or dtype.is_complex else torch.int64)


@temporaries(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.nansum.default)
def _sum(call: BoundArguments, gpu: GPU) -> list[int]:
    return _cast(call["self"], _summed_dtype(call), gpu, _dims(call))


@temporaries(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count(call: BoundArguments, gpu: GPU) -> list[int]:
    """A mask, unless the input is one, then its sum as int64 (TensorAdvancedIndexing.cpp)."""
    tensor = call["self"]
    mask = 0 if tensor.dtype == torch.bool else tensor.numel()
    strides = make_contiguous_strides_for(tensor.shape)
    buffers = reduction_buffers(tensor.shape, strides, _dims(call), torch.int64, gpu)
    return [mask, tensor.numel() * _INDEX, *buffers]


@temporaries(aten.logsumexp.default)
def _logsumexp(call: BoundArguments, gpu: GPU) -> list[int]:
    """The maxima, exp(x - maximum) of every element, and its sum."""
    tensor, dims = call["self"], _dims(call)
    reduced = {dim % tensor.dim() for dim in dims} if dims and tensor.dim() else set(range(tensor.dim()))
    rows = math.prod(size for dim, size in enumerate(tensor.shape) if dim not in reduced)
    peaks = _reduce(tensor, dims, gpu, accumulator=tensor.dtype.itemsize, input_vector=4)
    sums = reduction_buffers(tensor.shape, tensor.stride(), dims, tensor.dtype, gpu)
    return [rows * tensor.dtype.itemsize, *peaks, *_freed(peaks), tensor.nbytes, *sums]


@temporaries(aten.prod.default, aten.prod.dim_int, aten.linalg_vector_norm.default)
def _product(call: BoundArguments, gpu: GPU) -> list[int]:
    return _cast(call["self"], _summed_dtype(call), gpu, _dims(call), input_vector=4)


_CHUNK = 65536  # elements that one block of a foreach kernel takes


@temporaries(aten._foreach_norm.Scalar)
def _norms(call: BoundArguments, gpu: GPU) -> list[int]:
    """A partial result per chunk, as many for each tensor as the largest has."""
    tensors = call["self"]
    chunks = max((math.ceil(tensor.numel() / _CHUNK) for tensor in tensors), default=0)
    return [len(tensors) * chunks * max(4, tensors[0].dtype.itemsize)] if chunks else []


_WELFORD = 16  # bytes: mean, sum of squares, and the count twice (as an int and as a float)


@temporaries(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
def _variance(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    welford = 2 * _WELFORD if tensor.dtype == torch.float64 else _WELFORD
    return _reduce(tensor, _dims(call), gpu, accumulator=welford, input_vector=2)


def _extreme(call: BoundArguments, gpu: GPU, values: int = 1, out_dtype: Any = None) -> list[int]:
    size = values * call["self"].dtype.itemsize
    return _reduce(call["self"], _dims(call), gpu, accumulator=size, input_vector=4, out_dtype=out_dtype)


temporaries(aten.max.default, aten.min.default, aten.amax.default, aten.amin.default)(_extreme)
temporaries(aten.aminmax.default)(functools.partial(_extreme, values=2))
temporaries(aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim, aten.all.dims)(
    functools.partial(_extreme, out_dtype=torch.bool)
)
_VALUE_AND_INDEX = 16  # padded to the index's alignment, whatever the value's type


@temporaries(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
def _extreme_with_index(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor, dims = call["self"], _dims(call)
    kernel = {"accumulator": _VALUE_AND_INDEX, "input_vector": 4, "out_dtype": torch.int64}
    if call["dim"] is not None or tensor.is_contiguous():
        return _reduce(tensor, dims, gpu, **kernel)
    strides = make_contiguous_strides_for(tensor.shape)  # argmax without a dimension flattens
    return [tensor.nbytes, *reduction_buffers(tensor.shape, strides, dims, tensor.dtype, gpu, **kernel)]


# ------------------------------------------------------------------------ linear algebra, Fourier transforms

# cuSOLVER's workspaces, within 3 % of those measured on an H200 (CUDA 13.0) that have more than 4 MiB. Most
# ops take several matrices one after the other.


@temporaries(aten._linalg_eigh.default)
def _eigenvalues(call: BoundArguments, gpu: GPU) -> list[int]:
    matrices, n = call["A"], call["A"].shape[-1]
    count = math.prod(matrices.shape[:-2])
    if n < 32 or (n == 32 and count > 1):
        elements = min(count, gpu.multiprocessors) * (67_000 + 810 * n)  # measured for up to 16 at once
    elif n <= 512 and matrices.dtype == torch.float32:
        elements = n * (n + 38)
    else:
        elements = 4 * n * n + max(128 * n + 33_000, 196_000)
    copy = 0 if call["compute_v"] else matrices.nbytes
    return [copy, elements * matrices.dtype.itemsize]


@temporaries(aten._linalg_svd.default)
def _singular_values(call: BoundArguments, gpu: GPU) -> list[int]:
    matrices, item = call["A"], call["A"].dtype.itemsize
    m, n = matrices.shape[-2:]
    elements = 2 * m * n + 70 * min(m, n)
    if m != n:  # by way of QR
        elements = max(elements, _QR_ELEMENTS) + (m * n if m < n else 0)
    vectors = [] if call["compute_uv"] else [min(m, n) * m * item, min(m, n) * n * item]
    return [matrices.nbytes, *vectors, elements * item]


_QR_ELEMENTS = 1024 * 768


@temporaries(aten.linalg_qr.default)
def _qr(call: BoundArguments, gpu: GPU) -> list[int]:
    matrices = call["A"]
    m, n = matrices.shape[-2:]
    at_once = m <= 256 and math.prod(matrices.shape[:-2]) >= max(2, m // 16)
    return [] if at_once else [max(1024 * (512 + n), _QR_ELEMENTS) * matrices.dtype.itemsize]


def _copies(*names: str) -> TemporariesRule:
    return lambda call, gpu: [call[name].nbytes for name in names]


temporaries(aten.linalg_inv_ex.default)(_copies("A", "A"))  # the LU decomposition, and a copy of it
temporaries(aten._linalg_solve_ex.default)(_copies("A"))
temporaries(aten.cholesky_inverse.default, aten._cholesky_solve_helper.default)(_copies("self"))
temporaries(aten.linalg_lu_solve.default)(_copies("B"))
# cuFFT overwrites the input (native/cuda/SpectralOps.cpp).
temporaries(aten._fft_c2r.default)(_copies("self"))


@temporaries(aten.linalg_matrix_exp.default)
def _matrix_exponential(call: BoundArguments, gpu: GPU) -> list[int]:
    """Five powers and five sums of them (compute_T18 of native/LinearAlgebra.cpp); two more of one matrix."""
    return [(12 if call["self"].dim() == 2 else 10) * call["self"].nbytes]


# ---------------------------------------------------------------------- normalizations, softmax, roll, losses

_LONG = 64 * 1024  # rows
_ROWS_PER_BLOCK = 32
_GRID = 64 * 1024 // 2


def _contiguous_copies(*names: str) -> TemporariesRule:
    return lambda call, gpu: [contiguous_copy_bytes(call[name]) for name in names]


temporaries(aten.native_layer_norm.default)(_contiguous_copies("input", "weight"))
temporaries(aten._softmax.default, aten._log_softmax.default)(_contiguous_copies("self"))
temporaries(aten._log_softmax_backward_data.default)(_contiguous_copies("grad_output", "output"))


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
        staging = reduction_buffers((blocks, width), (width, 1), (0,), parameter.dtype, gpu)
        events += [width * parameter.element_size(), *staging, *_freed(staging)]
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
    input = call["input"]
    if not call["training"] or uses_cudnn_batch_norm(call, training=True):
        return []
    channels_last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    if input.is_contiguous() or channels_last:
        return _batch_norm_staging(input, values=4)
    # Any other strides: the mean and variance of a float32 copy that keeps them.
    copy = input.numel() * 4 if input.element_size() < 4 else 0
    dims = tuple(dim for dim in range(input.dim()) if dim != 1)
    reduced = input.shape, input.stride(), dims, torch.float32
    return [copy, *reduction_buffers(*reduced, gpu, accumulator=_WELFORD, input_vector=2)]


@temporaries(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    input, grad = call["input"], call["grad_out"]
    if call["train"] and uses_cudnn_batch_norm(call, training=True):
        return [0 if grad.is_contiguous(memory_format=suggest_memory_format(input)) else grad.nbytes]
    staging = _batch_norm_staging(input, values=2)
    results = [NEXT_RESULT] * sum(call["output_mask"]) if staging else []
    return [*staging, *_freed(staging), *results]  # the sums come before the gradients


@cuda_kernel(aten.native_batch_norm.default)
def _batch_norm_results(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    out, *kept = fake(func, args, kwargs)
    return out, *(_in_dtype(fake, each, torch.float32) if each.dtype in _HALF else each for each in kept)


# SyncBatchNorm calls these itself, and CUDA alone has them: native/cuda/Normalization.cuh. What is known of a
# channel is in float32 for half-precision inputs.
@cuda_kernel(aten.batch_norm_stats.default)
def _channel_stats(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return tuple(_of_channels(fake, args[0], _accumulated(args[0].dtype)) for _ in range(2))


@cuda_kernel(aten.batch_norm_gather_stats.default, aten.batch_norm_gather_stats_with_counts.default)
def _gathered_stats(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return tuple(_of_channels(fake, args[0], _accumulated(args[1].dtype)) for _ in range(2))


@cuda_kernel(aten.batch_norm_elemt.default, aten.batch_norm_backward_elemt.default)
def _normalised(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return fake(aten.empty_like.default, (args[0],), {})


@cuda_kernel(aten.batch_norm_backward_reduce.default)
def _channel_sums(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = bind(func, args, kwargs)
    weight = call["mean"] if call["weight"] is None else call["weight"]
    likes = call["mean"], call["mean"], weight, weight
    wanted = call["input_g"], call["input_g"], call["weight_g"], call["bias_g"]
    return tuple(
        _of_channels(fake, call["input"], like.dtype) if is_wanted else None
        for like, is_wanted in zip(likes, wanted, strict=True)
    )


@temporaries(aten.batch_norm_stats.default)
def _channel_stats_staging(call: BoundArguments, gpu: GPU) -> list[int]:
    return _batch_norm_staging(call["input"], values=4)


@temporaries(aten.batch_norm_backward_reduce.default)
def _channel_sums_staging(call: BoundArguments, gpu: GPU) -> list[int]:
    return _batch_norm_staging(call["input"], values=2)


def _of_channels(fake: Fake, tensor: Tensor, dtype: torch.dtype) -> Any:
    return fake(aten.new_empty.default, (tensor, [tensor.size(1)]), {"dtype": dtype})


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def uses_cudnn_batch_norm(call: BoundArguments, training: bool) -> bool:
    """As Normalization.cpp decides. cuDNN reads tensors in their suggested memory format only; torch's own
    kernels read any strides. A backward pass does not know its bias."""
    input, weight = call["input"], call["weight"]
    if not torch.backends.cudnn.enabled or weight is None or call.get("bias", weight) is None:
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    if input.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    largest_batch = 880801 if training else 65535
    return input.dim() >= 3 and input.size(0) <= largest_batch and input.numel() < 2**31 - 1


def _batch_norm_staging(tensor: Tensor, values: int) -> list[int]:
    """Rows are shared out over blocks where the channels lie next to each other, as in [N, C]."""
    if tensor.is_contiguous():
        channels_last = tensor.stride(1) == 1
    else:
        channels_last = suggest_memory_format(tensor) is not torch.contiguous_format
    if not channels_last:
        return []
    channels = tensor.size(1)
    rows = tensor.numel() // channels
    across = min(32, 1 << (channels.bit_length() - 1))
    down = min(1 << (math.ceil(rows / 16).bit_length() - 1), 512 // across)
    blocks = min(math.ceil(rows / (down * 16)), 128)
    if blocks < 8:
        return []
    return [values * channels * blocks * 4, math.ceil(channels / across) * 4]


@cuda_kernel(aten.native_layer_norm.default, aten.native_group_norm.default)
def _normalisation(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA's result is contiguous. Layer norm keeps mean and 1/std of half-precision inputs in float32, group
    norm in the weight's type; the CPU's follow the input in all."""
    out, *kept = fake(func, args, kwargs)
    wanted = kept[0].dtype
    if func is aten.native_layer_norm.default and wanted in _HALF:
        wanted = torch.float32
    elif func is aten.native_group_norm.default:
        given = [each for each in args[:2] if each is not None]
        wanted = given[-1].dtype
    out = in_memory_format(fake, out, torch.contiguous_format)
    return out, *(_in_dtype(fake, each, wanted) for each in kept)


@cuda_kernel(aten.native_group_norm_backward.default)
def _group_norm_gradients(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In the types of what they are for; the fake kernel's come from all inputs'."""
    call = bind(func, args, kwargs)
    input, weight = call["input"], call["weight"]
    sources = input, weight, weight
    return tuple(
        made if made is None or source is None else _in_dtype(fake, made, source.dtype)
        for made, source in zip(fake(func, args, kwargs), sources, strict=True)
    )


def _in_dtype(fake: Fake, tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if tensor.dtype == dtype else fake(aten.empty_like.default, (tensor,), {"dtype": dtype})


# Softmax and roll read their input contiguously: a strided one is copied first.


@cuda_kernel(aten._thnn_fused_lstm_cell.default, aten._thnn_fused_gru_cell.default)
def _cell(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """native/cuda/RNN.cu: the new states, and what the backward pass needs of the gates. Torch's own fake
    kernels are missing, or ask for biases."""
    state = args[2]
    rows, width = state.shape
    sizes = (1, 1, 4) if func is aten._thnn_fused_lstm_cell.default else (1, 5)
    return tuple(fake(aten.new_empty.default, (state, [rows, size * width]), {}) for size in sizes)


@cuda_kernel(aten._thnn_fused_gru_cell_backward.default)
def _gru_cell_gradients(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Of both products, the old state and both biases."""
    call = bind(func, args, kwargs)
    rows, width = call["grad_hy"].shape
    shapes = [[rows, 3 * width]] * 2 + [[rows, width]] + [[3 * width]] * 2 * call["has_bias"]
    made = [fake(aten.new_empty.default, (call["workspace"], shape), {}) for shape in shapes]
    return *made, *[None] * (5 - len(made))


@temporaries(aten._thnn_fused_lstm_cell_backward_impl.default, aten._thnn_fused_gru_cell_backward.default)
def _bias_gradients(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    """Sums over the rows, after all else."""
    if not call["has_bias"]:
        return []
    workspace, is_lstm = call["workspace"], "cy" in call
    columns = workspace.shape[1] if is_lstm else workspace.shape[1] // 5 * 3
    gates = torch.empty(len(workspace), columns, dtype=workspace.dtype, device="meta")
    return [*[NEXT_RESULT] * (3 if is_lstm else 5), *_reduce(gates, (0,), gpu)]


@cuda_kernel(aten._softmax.default, aten._log_softmax.default, aten.roll.default)
def _contiguous_result(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA copies a strided input first and writes a contiguous result; the fake kernel keeps the strides."""
    return in_memory_format(fake, fake(func, args, kwargs), torch.contiguous_format)


@temporaries(aten.roll.default)
def _roll(call: BoundArguments, gpu: GPU) -> list[int]:
    """Several dimensions are rolled one after the other."""
    tensor = call["self"]
    return [contiguous_copy_bytes(tensor), tensor.nbytes if len(call["dims"]) > 1 else 0]


@cuda_kernel(aten.where.self)
def _where(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A condition of bytes is copied to one of bools first (native/TensorCompare.cpp); the fake kernel
    refuses it."""
    condition, *others = args
    if condition.dtype == torch.uint8:
        condition = fake(aten._to_copy.default, (condition,), {"dtype": torch.bool})
    return fake(func, (condition, *others), kwargs)


@temporaries(aten.where.self)
def _condition_of_bools(call: BoundArguments, gpu: GPU) -> list[int]:
    condition = call["condition"]
    return [condition.numel()] if condition.dtype == torch.uint8 else []


# Results that CUDA makes large and then shrinks: they look small, and hold their first storage. Losses that
# are reduced take one element per element of the input until the mean is written, fold and unfold are as
# large as the input first.

_NO_REDUCTION = 0


def _shrunk(fake: Fake, elements: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of `shape` in a storage of so many elements, or of its own size if that is larger."""
    whole = fake(aten.empty.memory_format, ([elements],), {"dtype": dtype, "device": torch.device("cpu")})
    return fake(aten.resize_.default, (whole, list(shape)), {})


@cuda_kernel(aten.mse_loss.default, aten.smooth_l1_loss.default)
@cuda_kernel(aten.binary_cross_entropy.default, aten.soft_margin_loss.default)
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


@temporaries(aten.binary_cross_entropy.default, aten.soft_margin_loss.default)
def _cross_entropy(call: BoundArguments, gpu: GPU) -> list[int]:
    """Written into the result itself, whose mean then replaces it."""
    if call["reduction"] == _NO_REDUCTION:
        return []
    return [call["self"].element_size(), *_reduced(call, gpu)]


@temporaries(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy_with_logits(call: BoundArguments, gpu: GPU) -> list[int]:
    """log(sigmoid(x)), 1 - target, which becomes the loss, and the factors of the positive targets."""
    shape, dtype = _elementwise(call)
    whole = math.prod(shape) * dtype.itemsize
    loss = [whole, *_reduced(call, gpu)] if call["reduction"] != _NO_REDUCTION else []
    factors = call["pos_weight"]
    if factors is None:
        return [whole, *loss]
    return [whole, factors.numel() * dtype.itemsize, whole, -factors.numel() * dtype.itemsize, -whole, *loss]


@temporaries(aten.soft_margin_loss_backward.default)
def _soft_margin_loss_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """-target, -target * x and its exponential; two of them at a time."""
    shape, dtype = _elementwise(call)
    whole = math.prod(shape) * dtype.itemsize
    return [whole, whole, -whole, whole]


@cuda_kernel(aten.log_sigmoid_forward.default)
def _log_sigmoid(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA needs no buffer for the gradient."""
    out, _ = fake(func, args, kwargs)
    return out, fake(aten.new_empty.default, (out, [0]), {})


@temporaries(aten._pdist_backward.default)
def _distances_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """Each pair's part of both gradients."""
    rows = call["self"]
    return [(rows.size(0) - 1) * rows.numel() * rows.element_size()]


# --------------------------------------------------------------------------- sorts, scans, look-ups, scatters


_SCALAR = 8
_MAXIMUM = 2  # a mode of embedding bags


# CUB

_ALIGNED = 256
_DIGITS = 256  # of a radix pass over eight bits


def _cub_layout(*parts: int) -> int:
    """Each part is aligned; the whole has room to be aligned itself."""
    return sum(round_up(part, _ALIGNED) for part in parts) + _ALIGNED - 1


def radix_sort_bytes(items: int, key: int, value: int, bits: int | None = None) -> int:
    """CUB's temporary for sorting so many keys of `key` bytes with values of `value` bytes (0: none)."""
    passes = math.ceil((8 * key if bits is None else max(bits, 1)) / 8)
    tiles = math.ceil(items / (_ONESWEEP_TILE if value else _ONESWEEP_TILE_KEYS)[key])
    alternate = (items * key, items * value) if passes > 1 else (0, 0)
    return _cub_layout(passes * _DIGITS * 8, tiles * _DIGITS * 4, *alternate, passes * 4)


# Items that one block sorts, by the bytes of a key. Measured on an H200, with values of eight bytes.
_ONESWEEP_TILE = {8: 4608, 4: 5376, 2: 5632, 1: 5632}
# The same without values; keys of two bytes and of one are not measured.
_ONESWEEP_TILE_KEYS = {8: 5760, 4: 6912, 2: 5632, 1: 5632}


def scan_bytes(items: int, size: int = _INDEX) -> int:
    """CUB's temporary for a scan: a descriptor per tile, small beside the items. The tiles are those measured
    on an H200 for scans of float32 and selections of int64."""
    return _tile_states(items, (4096, 16) if size > 4 else (1920, 8))


def _tile_states(items: int, tiles: tuple[int, int]) -> int:
    tile, descriptor = tiles
    return _cub_layout(1, (math.ceil(items / tile) + 32) * descriptor)


# Items of a tile and bytes of its descriptor, in CUB's other algorithms.
_SELECT = 4096, 8  # DeviceSelect::Flagged and ::Unique, which count in 32 bits
_MASK_SCAN = 896, 16  # the int64 prefix sum of a mask
_RUN_LENGTH = 768, 16  # DeviceRunLengthEncode


# Embeddings

_SMALL_LOOKUP = 3072  # up to here each block walks over the indices; above, they are sorted
_ROWS_PER_PARTIAL = 10


@temporaries(aten.embedding_dense_backward.default)
def _embedding_backward(call: BoundArguments, gpu: GPU) -> list[int | None]:
    grad, indices, counted = call["grad_output"], call["indices"], call["scale_grad_by_freq"]
    copies = [contiguous_copy_bytes(indices), contiguous_copy_bytes(grad)]
    if indices.numel() <= _SMALL_LOOKUP and not counted:
        return [*copies, NEXT_RESULT]
    return [*copies, *_sorted_lookup(indices, grad, call["num_weights"], counted, False, gpu)]


@cuda_kernel(aten._embedding_bag.default)
def _bags(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """On CUDA every index has its bag's number, and only `max` keeps the places of the maxima."""
    call = bind(func, args, kwargs)
    output, _, sizes, places = fake(func, args, kwargs)
    bags = fake(aten.new_empty.default, (call["indices"], [call["indices"].numel()]), {})
    if call["mode"] != _MAXIMUM:
        places = fake(aten.new_empty.default, (places, [0]), {})
    return output, bags, sizes, places


@temporaries(aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)
def _bag_backward(call: BoundArguments, gpu: GPU) -> list[int | None]:
    grad, indices = call["grad"], call["indices"]
    copies = [contiguous_copy_bytes(grad)]
    if call["mode"] == _MAXIMUM or indices.numel() == 0:
        return [*copies]
    counted, rows = call["scale_grad_by_freq"], call["num_weights"]
    return [*copies, *_sorted_lookup(indices, grad, rows, counted, True, gpu)]


def _sorted_lookup(
    indices: Tensor, grad: Tensor, rows: int, counted: bool, bags: bool, gpu: GPU
) -> list[int | None]:
    """Indices are sorted; runs of one index are summed in parts of ten rows, then the parts of each run."""
    n, width, size = indices.numel(), grad.size(-1), indices.element_size()
    span = n * size
    sort = [span, radix_sort_bytes(n, size, size)]
    segments = min(n, rows)
    partials = n // _ROWS_PER_PARTIAL + segments
    unique, scan = [span, scan_bytes(n)], scan_bytes(segments)
    events: list[int | None] = [span, span, *sort, *_freed(sort)]  # sorted, and where each came from
    if counted:
        events += [span, scan_bytes(n), -scan_bytes(n)]
    events += [NEXT_RESULT, span, _SCALAR, *unique, *_freed(unique)]  # where each run starts
    events += [segments * size, segments * size, scan, -scan, _SCALAR, partials * size]
    accumulate = max(grad.element_size(), 4)
    block = min(-(-width // 32) * 32, 1024)
    grid = math.ceil(segments * -(-width // 32) * 32 / block)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if not bags and grid < 4 * gpu.multiprocessors and partials > 4 * grid and not deterministic:
        # Few long runs: parts are added into the result, or into a float32 twin of a half-precision one.
        twin = rows * width * accumulate if grad.element_size() < 4 else 0
        return [*events, partials * size, twin]
    return [*events, partials * width * accumulate]


# Sorting

_SMALL_SORT = 4096
_LARGE_SORT = 1_000_000
_FEW_SEGMENTS = 128


@temporaries(aten.randperm.default, aten.randperm.generator)
def _randperm(call: BoundArguments, gpu: GPU) -> list[int]:
    """The numbers in order are sorted by random keys, of so many bits that equal ones are rare
    (native/cuda/Randperm.cu)."""
    n = call["n"]
    value = call["dtype"].itemsize if isinstance(call["dtype"], torch.dtype) else _INDEX
    bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9)))))
    key = 4 if bits <= 32 else 8
    return [n * value, n * key, n * key, radix_sort_bytes(n, key, value, bits)]


@temporaries(aten.sort.default, aten.sort.stable)
def _sort(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    is_dense = tensor.stride(call["dim"]) == 1
    return _sorting(tensor.size(call["dim"]), tensor.numel(), tensor.element_size(), is_dense)


def _sorting(length: int, n: int, key: int, is_dense: bool) -> list[int]:
    """Of `n` keys in segments of `length`."""
    if length <= _SMALL_SORT:
        return [length * _INDEX]
    # Along a dimension that is not the fastest, the input, the values and the indices are copied.
    copies = [] if is_dense else [n * key, n * key, n * _INDEX]
    segments = n // length
    if segments == 1 or length >= _LARGE_SORT:
        return [*copies, length * _INDEX, radix_sort_bytes(length, key, _INDEX)]
    if segments < _FEW_SEGMENTS:
        first = [n * key, radix_sort_bytes(n, key, _INDEX)]
        second = radix_sort_bytes(n, _INDEX, 0, math.ceil(math.log2(segments)))
        return [*copies, n * _INDEX, n * _INDEX, *first, *_freed(first), second]
    return [*copies, n * _INDEX, _cub_layout(n * key, n * _INDEX)]


_TOPK_SORTED_IN_PLACE = 4096  # elements, up to which a kernel sorts a row without memory
_TOPK_THREADS = 256
_TOPK_BLOCKS_PER_MULTIPROCESSOR = 6  # by the registers that its kernel uses
# Up to so many rows, rows at least so long are each split over several blocks.
_TOPK_SPLIT = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))


@temporaries(aten.topk.default)
def _topk(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    tensor = call["self"]
    length = tensor.size(call["dim"]) if tensor.dim() else 1
    rows = tensor.numel() // max(length, 1)
    selected = _selecting(tensor, length, rows, gpu)
    if not call["sorted"] or call["k"] <= _TOPK_SORTED_IN_PLACE:
        return [*selected]
    # The selected are sorted like any tensor, and their indices gathered (native/cuda/TensorTopK.cpp).
    n, key = rows * call["k"], tensor.element_size()
    is_dense = call["dim"] in (-1, tensor.dim() - 1)
    sort = [NEXT_RESULT, NEXT_RESULT, *selected, *_freed(selected), n * key, n * _INDEX]
    temporary = _sorting(call["k"], n, key, is_dense)
    return [*sort, *temporary, *_freed(temporary), n * _INDEX]


def _selecting(tensor: Tensor, length: int, rows: int, gpu: GPU) -> list[int]:
    copy = contiguous_copy_bytes(tensor)
    if length < next((least for most, least in _TOPK_SPLIT if rows <= most), 400):
        return [copy]
    threads = gpu.multiprocessors * _TOPK_BLOCKS_PER_MULTIPROCESSOR * _TOPK_THREADS
    per_thread = min(max(math.ceil(tensor.numel() / threads), 4), 64)
    blocks = rows * math.ceil(length / (per_thread * _TOPK_THREADS))
    scan = scan_bytes(blocks)
    # The k-th values, what is sought in each row; digit counts per block and per row; ranks per block.
    state = [rows * tensor.element_size(), rows * 8, rows * 8]
    return [copy, *state, blocks * 512, rows * 1024, blocks * 4, blocks * 4, scan]


@temporaries(aten.cumsum.default, aten.cumprod.default)
def _scan(call: BoundArguments, gpu: GPU) -> list[int]:
    """A cast when the result's type is another; a copy when the input is not contiguous."""
    tensor, wanted = call["self"], _summed_dtype(call)
    n = tensor.numel()
    copy = n * wanted.itemsize if wanted != tensor.dtype or not tensor.is_contiguous() else 0
    one_row = tensor.dim() > 0 and n == tensor.size(call["dim"])
    return [copy, scan_bytes(n, wanted.itemsize) if one_row else 0]


# Indexing


@temporaries(
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
)
def _index_put(call: BoundArguments, gpu: GPU) -> list[int]:
    if not (call["accumulate"] or torch.are_deterministic_algorithms_enabled()):
        return []
    given = [index for index in call["indices"] if index is not None]
    if not given:
        return []
    n = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
    indexed = [dim for dim, index in enumerate(call["indices"]) if index is not None]
    return _sorted_put(call["self"], call["values"], n, indexed)


@temporaries(
    aten.index_add.default, aten.index_add_.default, aten.index_copy.default, aten.index_copy_.default
)
def _index_add(call: BoundArguments, gpu: GPU) -> list[int]:
    """Deterministic, it is an index_put of what is added, which is first multiplied (Indexing.cu,
    TensorAdvancedIndexing.cpp; read there, not measured). So it is in backward of index_select."""
    if not torch.are_deterministic_algorithms_enabled():
        return []
    target, source = call["self"], call["source"]
    product = [source.nbytes] if "alpha" in call else []
    dim = call["dim"] % max(target.dim(), 1)
    return [*product, *_sorted_put(target, source, call["index"].numel(), [dim])]


@temporaries(
    aten.scatter.src,
    aten.scatter_.src,
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
)
def _scatter(call: BoundArguments, gpu: GPU) -> list[int]:
    """Deterministic, it is an index_put with an index for each dimension, all but one of them views of a few
    numbers (TensorAdvancedIndexing.cpp; read there, not measured). So it is in backward of gather."""
    if not torch.are_deterministic_algorithms_enabled() or call.get("reduce", "sum") not in ("sum", "mean"):
        return []
    target, index = call["self"], call["index"]
    dim = call["dim"] % max(target.dim(), 1)
    if all(step == 0 for other, step in enumerate(index.stride()) if other != dim):
        return _sorted_put(target, call["src"], index.size(dim) if index.dim() else 1, [dim])
    return _sorted_put(target, call["src"], index.numel(), list(range(target.dim())))


def _sorted_put(target: Tensor, values: Tensor, n: int, indexed: list[int]) -> list[int]:
    """`n` flattened indices of the dimensions `indexed` are sorted, so that equal ones meet."""
    apart = indexed != list(range(indexed[0], indexed[-1] + 1))
    kept = [size for dim, size in enumerate(target.shape) if dim not in indexed]
    written = n * math.prod(kept)
    slices = math.prod(target.shape[indexed[-1] + 1 :]) if not apart else math.prod(kept)
    span = n * _INDEX
    events = [contiguous_copy_bytes(target), span, span, -span]
    if len(indexed) > 1:
        events += [span, span, -span, -span]
    if values.numel() < written or not values.is_contiguous():
        events.append(written * values.element_size())
    if apart:
        events.append(target.nbytes)
    bits = max(target.numel() // max(slices, 1), 1).bit_length()
    return [*events, span, span, span, radix_sort_bytes(n, _INDEX, _INDEX, bits)]


# Selections: nonzero, masks, unique values, counts


@cuda_kernel(aten.histc.default)
def _histogram(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA also counts integers, which the CPU does not (SummaryOps.cu, _histc_cuda)."""
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    options = {"dtype": args[0].dtype, "device": torch.device("cpu")}
    return fake(aten.empty.memory_format, ([bins],), options)


@temporaries(aten.nonzero.default)
def _nonzero(call: BoundArguments, gpu: GPU) -> list[int]:
    """Nonzero.cu: a count per chunk of 2^30 elements, and CUB's selection of one chunk."""
    tensor = call["self"]
    chunk = 1 << 30 if tensor.numel() >= 2**31 - 1 else max(tensor.numel(), 1)
    chunks = math.ceil(tensor.numel() / chunk)
    return [contiguous_copy_bytes(tensor), 4 * chunks, _tile_states(min(chunk, tensor.numel()), _SELECT)]


@temporaries(aten.nonzero_static.default)
def _nonzero_static(call: BoundArguments, gpu: GPU) -> list[int]:
    """Nonzero.cu: a count per block, and their running sum."""
    tensor = call["self"]
    block = 512 * 16
    wanted = gpu.multiprocessors * (2 if tensor.element_size() == 1 else 1)
    rounds = max(math.ceil(math.ceil(tensor.numel() / block) / wanted), 1)
    blocks = math.ceil(tensor.numel() / (rounds * block))
    return [contiguous_copy_bytes(tensor), blocks * 4, blocks * 8]


@temporaries(aten.masked_scatter.default, aten.masked_scatter_.default)
def _masked_scatter(call: BoundArguments, gpu: GPU) -> list[int]:
    """IndexKernel.cpp: a prefix sum of the mask in int64. So it is in backward of masked_select."""
    mask, source = call["mask"], call["source"]
    shape = torch.broadcast_shapes(call["self"].shape, mask.shape)
    n = math.prod(shape)
    copy = n if mask.shape != shape or not mask.is_contiguous() else 0
    scan = _tile_states(n, _MASK_SCAN)
    return [n * _INDEX, copy, scan, -scan, contiguous_copy_bytes(source)]


@temporaries(aten._unique.default, aten._unique2.default, aten.unique_consecutive.default)
def _unique(call: BoundArguments, gpu: GPU) -> Sequence[Temporary]:
    """UniqueCub.cu. The results are as long as the input, and are shortened without being reallocated."""
    if call.get("dim") is not None:
        return _unique_rows(call, gpu)
    tensor = call["self"]
    consecutive, inverse = "sorted" not in call, call["return_inverse"]
    counts = call.get("return_counts", False)
    if tensor.numel() == 0 or (tensor.dtype == torch.bool and not consecutive):
        return []
    n, key = tensor.numel(), tensor.element_size()
    span = n * _INDEX
    kept = [contiguous_copy_bytes(tensor)]
    if not consecutive:
        kept += [n * key, span if inverse else 0]  # sorted, and where each came from
    results = n * key + span * (inverse + counts)
    # The largest of three stages, less what is alive beside it in this list: the sort, the running count of
    # new values, and the selection.
    stages = [_SCALAR + _tile_states(n, _RUN_LENGTH if counts else _SELECT)]
    if not consecutive:
        stages.append(span * inverse + radix_sort_bytes(n, key, _INDEX if inverse else 0) - results)
    if inverse:
        stages.append(span + (n * 4 if consecutive else span) + scan_bytes(n) - results)
    return [*kept, max(stages)]


@temporaries(aten.unique_dim.default, aten.unique_dim_consecutive.default)
def _unique_rows(call: BoundArguments, gpu: GPU) -> list[int]:
    """Unique.cu: row numbers are sorted by the rows they stand for, and the rows are selected last."""
    tensor, dim = call["self"], call["dim"] % max(call["self"].dim(), 1)
    rows = tensor.size(dim) if tensor.dim() else 1
    span = rows * _INDEX
    numbers = [contiguous_copy_bytes(tensor.transpose(dim, 0) if tensor.dim() else tensor), span]
    sort = span + scan_bytes(rows)  # a merge sort's second buffer
    inverse = 2 * span + scan_bytes(rows) if call["return_inverse"] else 0
    counts = 2 * span + scan_bytes(rows) if call["return_counts"] else 0
    results = tensor.nbytes + span * (call["return_inverse"] + call["return_counts"])
    return [*numbers, max(max(sort, inverse, counts + span * call["return_inverse"]) - results, 0)]


@temporaries(aten.repeat_interleave.Tensor)
def _repeat_interleave(call: BoundArguments, gpu: GPU) -> list[int]:
    """Repeat.h: the running sum of the counts in int64."""
    repeats = call["repeats"]
    return [repeats.numel() * _INDEX, contiguous_copy_bytes(repeats)]


@temporaries(aten.bincount.default)
def _bincount(call: BoundArguments, gpu: GPU) -> list[int]:
    """SummaryOps.cu: weights other than float32 become float64."""
    weights = call["weights"]
    return [] if weights is None or weights.dtype in (torch.float32, torch.float64) else [8 * weights.numel()]


@temporaries(aten.multinomial.default)
def _multinomial(call: BoundArguments, gpu: GPU) -> list[int]:
    """MultinomialKernel.cu with replacement: the distribution, normalized, and its running sum. Else
    Distributions.cpp: one random number per category, of which the largest win."""
    weights, samples = call["self"], call["num_samples"]
    if call["replacement"] and samples > 1:
        return [weights.nbytes] * 3
    if samples == 1:
        return [weights.nbytes]
    rows = weights.numel() // max(weights.size(-1), 1)
    best = rows * samples * weights.element_size()
    return [weights.nbytes, best, *_topk({"self": weights, "dim": -1}, gpu)]
