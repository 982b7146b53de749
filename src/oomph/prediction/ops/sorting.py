"""Sorts, scans, unique values, counts and samples.

Sources, in ATen's native/cuda: Sort.cpp, SortStable.cu, TensorTopK.cu, TensorTopK.cpp, ScanUtils.cuh,
Randperm.cu, Unique.cu, UniqueCub.cu, SummaryOps.cu, MultinomialKernel.cu; and native/Distributions.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.ops.cub import (
    INDEX,
    RUN_LENGTH,
    SCALAR,
    SELECT,
    layout_bytes,
    radix_sort_bytes,
    scan_bytes,
    tile_states,
)
from oomph.prediction.ops.reductions import summed_dtype
from oomph.prediction.ops.registry import always, composite, cuda_kernel, op, temporaries
from oomph.prediction.ops.rules import (
    NEXT_RESULT,
    BoundArguments,
    Fake,
    RuleContext,
    Temporary,
    contiguous_copy_bytes,
    freed,
)
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

op("sort", launches=6)
op("topk", launches=4)
op("topk.default sort.default sort.stable", chooses=1)
op("multinomial.default", chooses=0)
op("randperm.default randperm.generator", random="permutation")
op("cumsum", launches=2)
op("unique_consecutive _unique2 unique_dim", waits=True)

# Sorts

_SMALL_SORT = 4096
_LARGE_SORT = 1_000_000
_FEW_SEGMENTS = 128


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
        return [length * INDEX]
    # Along a dimension that is not the fastest, the input, the values and the indices are copied.
    copies = [] if is_dense else [n * key, n * key, n * INDEX]
    segments = n // length
    if segments == 1 or length >= _LARGE_SORT:
        return [*copies, length * INDEX, radix_sort_bytes(length, key, INDEX)]
    if segments < _FEW_SEGMENTS:
        first = [n * key, radix_sort_bytes(n, key, INDEX)]
        second = radix_sort_bytes(n, INDEX, 0, math.ceil(math.log2(segments)))
        return [*copies, n * INDEX, n * INDEX, *first, *freed(first), second]
    return [*copies, n * INDEX, layout_bytes(n * key, n * INDEX)]


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
    sort = [NEXT_RESULT, NEXT_RESULT, *selected, *freed(selected), n * key, n * INDEX]
    temporary = _sorting(call["k"], n, key, is_dense)
    return [*sort, *temporary, *freed(temporary), n * INDEX]


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


# Scans


@temporaries(aten.cumsum.default, aten.cumprod.default)
def _scan(call: BoundArguments, gpu: GPU) -> list[int]:
    """A cast when the result's type is another; a copy when the input is not contiguous."""
    tensor, wanted = call["self"], summed_dtype(call)
    n = tensor.numel()
    copy = n * wanted.itemsize if wanted != tensor.dtype or not tensor.is_contiguous() else 0
    one_row = tensor.dim() > 0 and n == tensor.size(call["dim"])
    return [copy, scan_bytes(n, wanted.itemsize) if one_row else 0]


@composite(aten.cumprod_backward.default)
def _cumprod_backward(context: RuleContext, call: BoundArguments) -> Any:
    """FunctionsManual.cpp: a short path where no element of the input is zero. Of the other, what is in
    use at its peak; the fake tensors' own decomposition takes a third path, for tensor subclasses."""
    grad, source, dim, output = call["grad"], call["input"], call["dim"], call["output"]
    if source.numel() <= 1 or source.size(dim) == 1:
        return grad
    weighted, is_zero = output * grad, source == 0
    if not context.has_zeros(source):
        return _reversed_cumsum(weighted, dim).div(source)
    gradient, zeros_before = torch.zeros_like(source), is_zero.cumsum(dim)
    mask = zeros_before == 0
    outside = ~mask  # C++ keeps it, and what it masks, to the end of the expression
    masked = weighted.masked_fill(outside, 0.0)
    return gradient.masked_scatter_(mask, _reversed_cumsum(masked, dim).div_(source).masked_select(mask))


def _reversed_cumsum(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = tensor.flip(dim)
    total = flipped.cumsum(dim)
    return total.flip(dim)


# Unique values and counts

op("median.dim nanmedian.dim", nondeterministic=always)
op("histc.default", nondeterministic=lambda call: call["self"].dtype.is_floating_point)
op("bincount.default", nondeterministic=lambda call: call["weights"] is not None)


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
    span = n * INDEX
    kept = [contiguous_copy_bytes(tensor)]
    if not consecutive:
        kept += [n * key, span if inverse else 0]  # sorted, and where each came from
    results = n * key + span * (inverse + counts)
    # The largest of three stages, less what is alive beside it in this list: the sort, the running count of
    # new values, and the selection.
    stages = [SCALAR + tile_states(n, RUN_LENGTH if counts else SELECT)]
    if not consecutive:
        stages.append(span * inverse + radix_sort_bytes(n, key, INDEX if inverse else 0) - results)
    if inverse:
        stages.append(span + (n * 4 if consecutive else span) + scan_bytes(n) - results)
    return [*kept, max(stages)]


@temporaries(aten.unique_dim.default, aten.unique_dim_consecutive.default)
def _unique_rows(call: BoundArguments, gpu: GPU) -> list[int]:
    """Unique.cu: row numbers are sorted by the rows they stand for, and the rows are selected last."""
    tensor, dim = call["self"], call["dim"] % max(call["self"].dim(), 1)
    rows = tensor.size(dim) if tensor.dim() else 1
    span = rows * INDEX
    numbers = [contiguous_copy_bytes(tensor.transpose(dim, 0) if tensor.dim() else tensor), span]
    sort = span + scan_bytes(rows)  # a merge sort's second buffer
    inverse = 2 * span + scan_bytes(rows) if call["return_inverse"] else 0
    counts = 2 * span + scan_bytes(rows) if call["return_counts"] else 0
    results = tensor.nbytes + span * (call["return_inverse"] + call["return_counts"])
    return [*numbers, max(max(sort, inverse, counts + span * call["return_inverse"]) - results, 0)]


@temporaries(aten.bincount.default)
def _bincount(call: BoundArguments, gpu: GPU) -> list[int]:
    """SummaryOps.cu: weights other than float32 become float64."""
    weights = call["weights"]
    return [] if weights is None or weights.dtype in (torch.float32, torch.float64) else [8 * weights.numel()]


@cuda_kernel(aten.histc.default)
def _histogram(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA also counts integers, which the CPU does not (SummaryOps.cu, _histc_cuda)."""
    bins = args[1] if len(args) > 1 else kwargs.get("bins", 100)
    options = {"dtype": args[0].dtype, "device": torch.device("cpu")}
    return fake(aten.empty.memory_format, ([bins],), options)


# Samples


@temporaries(aten.randperm.default, aten.randperm.generator)
def _randperm(call: BoundArguments, gpu: GPU) -> list[int]:
    """The numbers in order are sorted by random keys, of so many bits that equal ones are rare
    (native/cuda/Randperm.cu)."""
    n = call["n"]
    value = call["dtype"].itemsize if isinstance(call["dtype"], torch.dtype) else INDEX
    bits = min(64, math.ceil(math.log2(n - (6 * n * n + 1) / (12 * math.log(0.9)))))
    key = 4 if bits <= 32 else 8
    return [n * value, n * key, n * key, radix_sort_bytes(n, key, value, bits)]


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
