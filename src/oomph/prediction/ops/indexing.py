"""Look-ups, selections and scatters: embeddings, gather, index, masks, nonzero.

Sources, in ATen's native/cuda: Embedding.cu, EmbeddingBag.cu, EmbeddingBackwardKernel.cu, Indexing.cu,
Nonzero.cu, IndexKernel.cpp; native/TensorAdvancedIndexing.cpp and native/Repeat.h.
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
    MASK_SCAN,
    SCALAR,
    SELECT,
    radix_sort_bytes,
    scan_bytes,
    tile_states,
)
from oomph.prediction.ops.registry import always, composite, cuda_kernel, op, temporaries
from oomph.prediction.ops.rules import (
    NEXT_RESULT,
    BoundArguments,
    Fake,
    RuleContext,
    bind,
    contiguous_copy_bytes,
    freed,
)
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

op("index.Tensor _unsafe_index.Tensor masked_select.default", takes_masks=True)
op(
    "index_put.default index_put_.default _index_put_impl_.default _unsafe_index_put.default",
    takes_masks=True,
    assigns_by_index=True,
)
op("index.Tensor index_put.default index_put_.default _index_put_impl_.default", takes_two_devices=True)
op("_unsafe_index.Tensor _unsafe_index_put.default", takes_two_devices=True)
op("index.Tensor gather.default index_select.default", keeps_values=True)
op("embedding.default", looks_up=lambda table, indices, *_: [(0, indices)])
op("index_select.default gather.default", looks_up=lambda table, dim, indices, *_: [(dim, indices)])
op("index.Tensor", looks_up=lambda table, indices: enumerate(indices))
# The formulas of gather, index, max and their like scatter a gradient into fresh zeros.
op(
    """
    scatter.src scatter.value scatter_add.default index_put.default index_add.default
    masked_scatter.default index_fill.int_Tensor
    """,
    reuses_first=("fresh zeros",),
)
op("embedding index _unsafe_index gather index_select take", gathers=True)
op("index_add_ scatter_add_ scatter_ index_copy_ index_add scatter_add scatter", scatters=True)
# Sorted first: several kernels.
op("index_put index_put_ _index_put_impl_ embedding_dense_backward", scatters=True, launches=8)
op("nonzero", launches=4, waits=True)
op("masked_select", waits=True)

# Embeddings

_MAXIMUM = 2  # a mode of embedding bags
_SMALL_LOOKUP = 3072  # up to here each block walks over the indices; above, they are sorted
_ROWS_PER_PARTIAL = 10


@temporaries(aten.embedding_dense_backward.default)
def _embedding_backward(call: BoundArguments, gpu: GPU) -> list[int | None]:
    grad, indices, counted = call["grad_output"], call["indices"], call["scale_grad_by_freq"]
    copies = [contiguous_copy_bytes(indices), contiguous_copy_bytes(grad)]
    if indices.numel() <= _SMALL_LOOKUP and not counted:
        return [*copies, NEXT_RESULT]
    return [*copies, *_sorted_lookup(indices, grad, call["num_weights"], counted, False, gpu)]


op("_embedding_bag.default", allocation_order=(2, 1, 0, 3))  # EmbeddingBag.cu


def _takes_maxima(call: BoundArguments) -> bool:
    return bool(call["mode"] == _MAXIMUM)


op(
    "_embedding_bag_backward.default _embedding_bag_dense_backward.default",
    nondeterministic=_takes_maxima,
)


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
    events: list[int | None] = [span, span, *sort, *freed(sort)]  # sorted, and where each came from
    if counted:
        events += [span, scan_bytes(n), -scan_bytes(n)]
    events += [NEXT_RESULT, span, SCALAR, *unique, *freed(unique)]  # where each run starts
    events += [segments * size, segments * size, scan, -scan, SCALAR, partials * size]
    accumulate = max(grad.element_size(), 4)
    block = min(-(-width // 32) * 32, 1024)
    grid = math.ceil(segments * -(-width // 32) * 32 / block)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if not bags and grid < 4 * gpu.multiprocessors and partials > 4 * grid and not deterministic:
        # Few long runs: parts are added into the result, or into a float32 twin of a half-precision one.
        twin = rows * width * accumulate if grad.element_size() < 4 else 0
        return [*events, partials * size, twin]
    return [*events, partials * width * accumulate]


@composite(aten.one_hot.default)
def _one_hot(context: RuleContext, call: BoundArguments) -> Any:
    ids, classes = call["self"], call["num_classes"]
    if classes == -1 and ids.numel() > 0:
        classes = context.count_classes(ids, "aten.one_hot")
    if classes <= 0:
        return NotImplemented
    out = ids.new_zeros((*ids.shape, classes))
    return out.scatter_(-1, ids.unsqueeze(-1), 1)


# Positions that are given

op("index_add.default index_add_.default", same_dtype=("self", "source"))
op("index_put.default index_put_.default", same_dtype=("self", "values"))
op("put.default put_.default", nondeterministic=always)


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
    span = n * INDEX
    events = [contiguous_copy_bytes(target), span, span, -span]
    if len(indexed) > 1:
        events += [span, span, -span, -span]
    if values.numel() < written or not values.is_contiguous():
        events.append(written * values.element_size())
    if apart:
        events.append(target.nbytes)
    bits = max(target.numel() // max(slices, 1), 1).bit_length()
    return [*events, span, span, span, radix_sort_bytes(n, INDEX, INDEX, bits)]


# Positions that are found


@temporaries(aten.nonzero.default)
def _nonzero(call: BoundArguments, gpu: GPU) -> list[int]:
    """Nonzero.cu: a count per chunk of 2^30 elements, and CUB's selection of one chunk."""
    tensor = call["self"]
    chunk = 1 << 30 if tensor.numel() >= 2**31 - 1 else max(tensor.numel(), 1)
    chunks = math.ceil(tensor.numel() / chunk)
    return [contiguous_copy_bytes(tensor), 4 * chunks, tile_states(min(chunk, tensor.numel()), SELECT)]


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
    scan = tile_states(n, MASK_SCAN)
    return [n * INDEX, copy, scan, -scan, contiguous_copy_bytes(source)]


@temporaries(aten.repeat_interleave.Tensor)
def _repeat_interleave(call: BoundArguments, gpu: GPU) -> list[int]:
    """Repeat.h: the running sum of the counts in int64."""
    repeats = call["repeats"]
    return [repeats.numel() * INDEX, contiguous_copy_bytes(repeats)]
