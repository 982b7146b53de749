"""Memory that CUDA's sorts, scans, look-ups, selections and scatters take and no output shows.

Sources, in ATen's native/cuda: Embedding.cu, EmbeddingBag.cu, EmbeddingBackwardKernel.cu, Sort.cpp,
SortStable.cu, TensorTopK.cu, ScanUtils.cuh, Indexing.cu, Nonzero.cu, IndexKernel.cpp, Unique.cu,
UniqueCub.cu, SummaryOps.cu, MultinomialKernel.cu; native/Repeat.h, native/Distributions.cpp; and CUB's
radix sort, whose temporary holds alternate buffers for keys and values and a little per tile. The figures
come out exactly as measured on an H200 with torch 2.11. CUB's share per tile, at most 3 % of its temporary,
is assumed to be the same on other GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.cuda.rules import (
    NEXT_RESULT,
    BoundArguments,
    Fake,
    bind,
    contiguous_copy_bytes,
    cuda_kernel,
    temporaries,
)
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

_INDEX = 8
_SCALAR = 8
_MAXIMUM = 2  # a mode of embedding bags


def _freed(events: Sequence[int]) -> list[int]:
    return [-size for size in events]


# CUB

_ALIGNED = 256
_DIGITS = 256  # of a radix pass over eight bits


def _cub_layout(*parts: int) -> int:
    """Each part is aligned; the whole has room to be aligned itself."""
    return sum(-(-part // _ALIGNED) * _ALIGNED for part in parts) + _ALIGNED - 1


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
    """CUB's temporary for a scan or a selection: a descriptor per tile, small beside the items. The tiles are
    those measured on an H200 for scans of float32 and selections of int64."""
    tile, descriptor = (4096, 16) if size > 4 else (1920, 8)
    return _tile_states(items, tile, descriptor)


def _tile_states(items: int, tile: int, descriptor: int) -> int:
    return _cub_layout(1, (math.ceil(items / tile) + 32) * descriptor)


def select_bytes(items: int) -> int:
    """CUB's temporary for DeviceSelect::Flagged and ::Unique, which count in 32 bits."""
    return _tile_states(items, 4096, 8)


def mask_scan_bytes(items: int) -> int:
    """CUB's temporary for the int64 prefix sum of a mask."""
    return _tile_states(items, 896, 16)


def run_length_bytes(items: int) -> int:
    """CUB's temporary for DeviceRunLengthEncode."""
    return _tile_states(items, 768, 16)


# Embeddings

_SMALL_LOOKUP = 3072  # up to here each block walks over the indices; above, they are sorted
_ROWS_PER_PARTIAL = 10


@temporaries(aten.embedding_dense_backward.default)
def _embedding_backward(call: BoundArguments, gpu: GPU) -> list[int | None]:
    grad, indices = call["grad_output"], call["indices"]
    copies = [contiguous_copy_bytes(indices), contiguous_copy_bytes(grad)]
    if indices.numel() <= _SMALL_LOOKUP and not call["scale_grad_by_freq"]:
        return [*copies, NEXT_RESULT]
    counted = call["scale_grad_by_freq"]
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
    counted = call["scale_grad_by_freq"]
    return [*copies, *_sorted_lookup(indices, grad, call["num_weights"], counted, True, gpu)]


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
    length = tensor.size(call["dim"])
    if length <= _SMALL_SORT:
        return [length * _INDEX]
    n, key = tensor.numel(), tensor.element_size()
    # Along a dimension that is not the fastest, the input, the values and the indices are copied.
    copies = [] if tensor.stride(call["dim"]) == 1 else [n * key, n * key, n * _INDEX]
    segments = n // length
    if segments == 1 or length >= _LARGE_SORT:
        return [*copies, length * _INDEX, radix_sort_bytes(length, key, _INDEX)]
    if segments < _FEW_SEGMENTS:
        first = [n * key, radix_sort_bytes(n, key, _INDEX)]
        second = radix_sort_bytes(n, _INDEX, 0, math.ceil(math.log2(segments)))
        return [*copies, n * _INDEX, n * _INDEX, *first, *_freed(first), second]
    return [*copies, n * _INDEX, _cub_layout(n * key, n * _INDEX)]


_TOPK_THREADS = 256
_TOPK_BLOCKS_PER_MULTIPROCESSOR = 6  # by the registers that its kernel uses
# Up to so many rows, rows at least so long are each split over several blocks.
_TOPK_SPLIT = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))


@temporaries(aten.topk.default)
def _topk(call: BoundArguments, gpu: GPU) -> list[int]:
    tensor = call["self"]
    length = tensor.size(call["dim"]) if tensor.dim() else 1
    rows = tensor.numel() // max(length, 1)
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
    tensor = call["self"]
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    wanted = call["dtype"] or (torch.int64 if whole else tensor.dtype)
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
    return [contiguous_copy_bytes(tensor), 4 * chunks, select_bytes(min(chunk, tensor.numel()))]


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
    scan = mask_scan_bytes(n)
    return [n * _INDEX, copy, scan, -scan, contiguous_copy_bytes(source)]


@temporaries(aten._unique.default, aten._unique2.default, aten.unique_consecutive.default)
def _unique(call: BoundArguments, gpu: GPU) -> Sequence[int | None]:
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
    stages = [_SCALAR + (run_length_bytes(n) if counts else select_bytes(n))]
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
