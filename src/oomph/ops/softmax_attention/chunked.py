"""Attention one chunk of queries at a time, recomputed in backward: plain torch, any device, linear memory.

A chunk holds whole rows of the softmax, so chunks need no merging. Scores, weights and all sums are fp32, or
float64 for float64 inputs. On a GPU the factors of products keep half precision; elsewhere they are fp32 too.

Saved for backward: q, k, v and the bias.

B batch, H query heads, G key/value heads, Q and K lengths. Products are batched over Z = batch x key/value
heads, with R = (query heads per key/value head) x queries rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.ops.common import OpFunction, no_autocast, refuse_second_derivatives
from oomph.ops.softmax_attention.arguments import AttentionArguments
from oomph.units import MiB

_GPU_BUDGET = 256 * MiB  # fewer, larger launches
_CPU_BUDGET = 32 * MiB  # chunks that stay in the last-level cache are worth more than larger products
# On a CPU, or causal: tall enough for an efficient product; causal chunks waste half of their height.
_QUERIES_PER_CHUNK = 256
_SCORE_BUFFERS = 3  # scores and weights (or weights and their gradient), and the bias
_FUNCTION_BUFFERS = 3  # temporaries of a bias function


class ChunkedAttention(OpFunction):
    op = "attention"

    @staticmethod
    def forward(ctx: Any, a: AttentionArguments, *tensors: Tensor | None) -> Tensor:
        with no_autocast(a.q):
            out = _forward(a)
        ctx.arguments = a.without_tensors()
        # The bias function holds its tensors; saved as well, autograd detects in-place changes to them.
        ctx.save_for_backward(a.key_mask, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention")
        key_mask, q, k, v, bias, *_ = ctx.saved_tensors
        a = replace(ctx.arguments, q=q, k=k, v=v, bias=bias, key_mask=key_mask)
        with no_autocast(q):
            return None, *_backward(a, grad_out, ctx.needs_input_grad[1:])


# Chunks ----------------------------------------------------------------------------------------------


class ChunkSizes(NamedTuple):
    """Batch entries x key/value heads (with all their query heads) x queries."""

    batch: int
    key_value_heads: int
    queries: int


@dataclass(frozen=True, eq=False)
class _QueryChunk:
    """Queries start:stop and the keys they attend to: first:last, or those of `index` where not contiguous.

    From the key numbered `causal_from` within the chunk on, keys may lie after the chunk's first query; None
    where the causal mask has no effect.
    """

    start: int
    stop: int
    first: int
    last: int
    index: Tensor | None
    causal_from: int | None

    @property
    def keys(self) -> int:
        return self.last - self.first if self.index is None else self.index.shape[0]

    @property
    def needs_causal_mask(self) -> bool:
        return self.causal_from is not None and self.causal_from < self.keys

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """The chunk's keys out of all keys along `dim`."""
        if self.index is None:
            return tensor.narrow(dim, self.first, self.last - self.first)
        return tensor.index_select(dim, self.index)

    def add(self, total: Tensor, part: Tensor, dim: int) -> None:
        """total[keys] += part"""
        if self.index is None:
            total.narrow(dim, self.first, self.last - self.first).add_(part)
        else:
            total.index_add_(dim, self.index, part)

    def key_index(self, device: torch.device) -> Tensor:
        return torch.arange(self.first, self.last, device=device) if self.index is None else self.index


def chunk_sizes(a: AttentionArguments) -> ChunkSizes:
    """Chunks whose temporaries stay within the budget, but never less than one query of one head."""
    on_cpu = a.q.device.type == "cpu"
    budget = a.memory_budget or (_CPU_BUDGET if on_cpu else _GPU_BUDGET)
    buffers = _SCORE_BUFFERS + (_FUNCTION_BUFFERS if a.bias_function is not None else 0)
    scores = budget // (buffers * _compute_dtype(a).itemsize)
    per_query = max(1, a.group * a.keys)
    tallest = _QUERIES_PER_CHUNK if on_cpu or a.masks_future else a.queries
    queries = max(1, min(a.queries, tallest, scores // per_query))
    if a.pattern is not None:
        queries = max(1, min(queries, a.pattern.block))
        per_query = max(1, a.group * _most_keys(a))
    heads_and_batch = max(1, scores // (per_query * queries))
    heads = min(heads_and_batch, a.k.shape[1])
    batch = max(1, min(heads_and_batch // a.k.shape[1], a.k.shape[0]))
    return ChunkSizes(batch, heads, queries)


def _most_keys(a: AttentionArguments) -> int:
    """The most keys that any query of a pattern attends to."""
    assert a.pattern is not None
    size, total = a.pattern.block, -(-a.keys // a.pattern.block)
    first, last = a.offset // size, (a.keys - 1) // size
    counts = (len(a.pattern.key_blocks(i, total, a.masks_future)) for i in range(first, last + 1))
    return min(a.keys, max(counts, default=0) * size)


def _query_chunks(a: AttentionArguments) -> Iterator[_QueryChunk]:
    """Those that attend to any key."""
    queries, start = chunk_sizes(a).queries, 0
    all_keys = None if a.pattern is None else torch.arange(a.keys, device=a.q.device)
    while start < a.queries:
        position, stop = start + a.offset, min(start + queries, a.queries)
        if all_keys is None or a.pattern is None:
            # A causal chunk's last query attends to its own position.
            last = max(0, stop + a.offset) if a.masks_future else a.keys
            chunk = _QueryChunk(start, stop, 0, last, None, max(0, min(last, position + 1)))
        else:
            size = a.pattern.block
            # Within one block of positions, so that all its queries attend to the same blocks of keys.
            stop = min(stop, (position // size + 1) * size - a.offset)
            blocks = a.pattern.key_blocks(position // size, -(-a.keys // size), a.masks_future)
            causal_from = sum(min(size, max(0, position + 1 - block * size)) for block in blocks)
            first, last = (blocks[0] * size, min(a.keys, (blocks[-1] + 1) * size)) if blocks else (0, 0)
            index = None
            if blocks and blocks[-1] - blocks[0] + 1 != len(blocks):
                index = torch.cat([all_keys[block * size : (block + 1) * size] for block in blocks])
            chunk = _QueryChunk(start, stop, first, last, index, causal_from)
        if chunk.keys:
            yield chunk if a.masks_future else replace(chunk, causal_from=None)
        start = stop


def _compute_dtype(a: AttentionArguments) -> torch.dtype:
    return torch.float64 if a.q.dtype == torch.float64 else torch.float32


def _factor_dtype(a: AttentionArguments) -> torch.dtype:
    return a.q.dtype if a.q.device.type == "cuda" else _compute_dtype(a)


def _bias_rows(bias_BHQK: Tensor, batch: slice, query_heads: slice, chunk: _QueryChunk) -> Tensor:
    """The chunk's rows of a bias or of its gradient, a view; dimensions of size 1 stay."""
    spans = (batch, query_heads, slice(chunk.start, chunk.stop))
    return bias_BHQK[
        tuple(span if size > 1 else slice(None) for span, size in zip(spans, bias_BHQK.shape, strict=False))
    ]


def _bias_values(
    a: AttentionArguments, batch: slice, query_heads: slice, chunk: _QueryChunk
) -> Tensor | None:
    """The bias of a chunk, which broadcasts to its scores; None where there is none."""
    if a.bias is not None:
        rows = _bias_rows(a.bias, batch, query_heads, chunk)
        return chunk.take(rows, 3) if a.bias.shape[3] > 1 else rows
    if a.bias_function is None:
        return None
    spans = (batch, query_heads, slice(chunk.start, chunk.stop))
    indices = [torch.arange(span.start, span.stop, device=a.q.device) for span in spans]
    b, h, q_index, k_index = (*indices, chunk.key_index(a.q.device))
    return a.bias_function(
        b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q_index.view(1, 1, -1, 1), k_index.view(1, 1, 1, -1)
    )


def _future(a: AttentionArguments, chunk: _QueryChunk, first: int) -> Tensor:
    """[Q, K - first], True where a key, from the chunk's key `first` on, lies after the query."""
    position = torch.arange(chunk.start, chunk.stop, device=a.q.device) + a.offset
    return chunk.key_index(a.q.device)[first:] > position[:, None]


# Products and softmax --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _HeadSlice:
    """Some batch entries and key/value heads, with the `group` query heads of each."""

    batch: slice
    heads: slice
    group: int

    @property
    def query_heads(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    def rows(self, tensor_BHQx: Tensor, chunk: _QueryChunk) -> Tensor:
        """[Z, R, x] of a tensor with query heads."""
        part = tensor_BHQx[self.batch, self.query_heads, chunk.start : chunk.stop]
        batch = part.shape[0] * (part.shape[1] // self.group)
        return part.reshape(batch, self.group * part.shape[2], part.shape[3])

    def unflatten(self, tensor_ZRx: Tensor, chunk: _QueryChunk) -> Tensor:
        """[batch, query heads, queries, x] of [Z, R, x]."""
        heads = (self.heads.stop - self.heads.start) * self.group
        return tensor_ZRx.reshape(-1, heads, chunk.stop - chunk.start, tensor_ZRx.shape[-1])

    def matrices(self, tensor_BGKx: Tensor, dtype: torch.dtype) -> Tensor:
        """[Z, K, x] of a tensor with key/value heads."""
        return tensor_BGKx[self.batch, self.heads].to(dtype).flatten(0, 1)


def _head_slices(a: AttentionArguments) -> Iterator[_HeadSlice]:
    sizes = chunk_sizes(a)
    for b in range(0, a.k.shape[0], sizes.batch):
        for g in range(0, a.k.shape[1], sizes.key_value_heads):
            batch, heads = min(b + sizes.batch, a.k.shape[0]), min(g + sizes.key_value_heads, a.k.shape[1])
            yield _HeadSlice(slice(b, batch), slice(g, heads), a.group)


def _bmm(a_ZRx: Tensor, b_ZxC: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """a @ b in `dtype`, which may be wider than that of the factors."""
    wider = {} if dtype == a_ZRx.dtype else {"out_dtype": dtype}
    return torch.bmm(a_ZRx, b_ZxC, out=out, **wider)  # type: ignore[call-overload,no-any-return]


class _ScoreBuffers:
    """Scores and weights of a chunk, in memory that all chunks reuse.

    Causal chunks grow: allocated one by one, each would take a new segment of a GPU's memory.
    """

    def __init__(self, a: AttentionArguments, chunks: list[_QueryChunk]) -> None:
        self.a = a
        sizes = chunk_sizes(a)
        rows = sizes.batch * sizes.key_value_heads * a.group
        largest = rows * max((chunk.keys * (chunk.stop - chunk.start) for chunk in chunks), default=0)
        self.dtype = _compute_dtype(a)
        self._scores, self._weights = (a.q.new_empty(largest, dtype=self.dtype) for _ in range(2))
        factor = _factor_dtype(a)
        self._factor = None if factor == self.dtype else a.q.new_empty(largest, dtype=factor)

    def scores(self, rows_ZRx: Tensor, columns_ZKx: Tensor) -> Tensor:
        """rows @ columns^T, in the first buffer."""
        shape = (rows_ZRx.shape[0], rows_ZRx.shape[1], columns_ZKx.shape[1])
        out = self._scores[: math.prod(shape)].view(shape)
        return _bmm(rows_ZRx, columns_ZKx.transpose(1, 2), self.dtype, out)

    def weights(self, heads: _HeadSlice, chunk: _QueryChunk, q_ZRD: Tensor, k_ZKD: Tensor) -> Tensor:
        """The softmax of one chunk, in the second buffer; rows without keys are zeros."""
        a = self.a
        scores_ZRK = self.scores(q_ZRD, k_ZKD).mul_(a.scale)
        scores_BHQK = heads.unflatten(scores_ZRK, chunk)  # a view
        bias = _bias_values(a, heads.batch, heads.query_heads, chunk)
        if bias is not None:
            scores_BHQK.add_(bias)
        if chunk.causal_from is not None and chunk.needs_causal_mask:
            future = _future(a, chunk, chunk.causal_from)
            scores_BHQK[..., chunk.causal_from :].masked_fill_(future, -math.inf)
        if a.key_mask is not None:
            allowed = chunk.take(a.key_mask[heads.batch], 1)
            scores_BHQK.masked_fill_(~allowed[:, None, None, :], -math.inf)
        weights_ZRK = self._weights[: scores_ZRK.numel()].view(scores_ZRK.shape)
        torch.softmax(scores_ZRK, -1, out=weights_ZRK)
        # A bias may be -inf in a whole row.
        if bias is not None or a.key_mask is not None or (a.causal and a.offset < 0):
            no_key_ZR1 = scores_ZRK.amax(-1, keepdim=True) == -math.inf
            weights_ZRK.masked_fill_(no_key_ZR1, 0.0)
        return weights_ZRK

    def to_factor(self, scores_ZRK: Tensor) -> Tensor:
        """In the dtype of the factors of products; in the third buffer where that differs."""
        if self._factor is None:
            return scores_ZRK
        return self._factor[: scores_ZRK.numel()].view(scores_ZRK.shape).copy_(scores_ZRK)


def _forward(a: AttentionArguments) -> Tensor:
    out = a.q.new_zeros((*a.q.shape[:3], a.v.shape[3]))
    if 0 in (out.numel(), a.keys):
        return out
    dtype = _factor_dtype(a)
    chunks = list(_query_chunks(a))
    buffers = _ScoreBuffers(a, chunks)
    for heads in _head_slices(a):
        k_ZKD, v_ZKE = heads.matrices(a.k, dtype), heads.matrices(a.v, dtype)
        for chunk in chunks:
            q_ZRD = heads.rows(a.q, chunk).to(dtype)
            weights_ZRK = buffers.weights(heads, chunk, q_ZRD, chunk.take(k_ZKD, 1))
            out_ZRE = _bmm(buffers.to_factor(weights_ZRK), chunk.take(v_ZKE, 1), dtype)
            out[heads.batch, heads.query_heads, chunk.start : chunk.stop] = heads.unflatten(out_ZRE, chunk)
    return out


def _backward(a: AttentionArguments, grad_out: Tensor, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    grad_q, grad_k, grad_v = (
        torch.zeros_like(x) if want else None for x, want in zip((a.q, a.k, a.v), wanted, strict=False)
    )
    bias_gradients = _BiasGradients(a, wanted[3:])
    if 0 in (grad_out.numel(), a.keys):
        return grad_q, grad_k, grad_v, *bias_gradients.result()
    dtype = _factor_dtype(a)
    chunks = list(_query_chunks(a))
    buffers = _ScoreBuffers(a, chunks)
    for heads in _head_slices(a):
        k_ZKD, v_ZKE = heads.matrices(a.k, dtype), heads.matrices(a.v, dtype)
        grads = [None if grad is None else grad[heads.batch, heads.heads] for grad in (grad_k, grad_v)]
        # In place where that is the gradient's own dtype: a copy would grow with the number of keys.
        sum_k, sum_v = (
            grad
            if grad is None or grad.dtype == buffers.dtype
            else torch.zeros_like(grad, dtype=buffers.dtype)
            for grad in grads
        )
        for chunk in chunks:
            q_ZRD, k_ZkD = heads.rows(a.q, chunk).to(dtype), chunk.take(k_ZKD, 1)
            grad_out_ZRE = heads.rows(grad_out, chunk).to(dtype)
            weights_ZRk = buffers.weights(heads, chunk, q_ZRD, k_ZkD)
            if sum_v is not None:
                _add_product(sum_v, chunk, buffers.to_factor(weights_ZRk), grad_out_ZRE, 1.0)
            if not any((*wanted[:2], *wanted[3:])):
                continue
            grad_ZRk = buffers.scores(grad_out_ZRE, chunk.take(v_ZKE, 1))  # overwrites the scores
            # Of the softmax, in place: w * (g - sum(w * g)).
            grad_ZRk.mul_(weights_ZRk)
            total_ZR1 = grad_ZRk.sum(-1, keepdim=True)
            grad_ZRk.addcmul_(weights_ZRk, total_ZR1, value=-1.0)
            factor_ZRk = buffers.to_factor(grad_ZRk)
            if grad_q is not None:
                rows = grad_q[heads.batch, heads.query_heads, chunk.start : chunk.stop]
                rows.copy_(heads.unflatten(_bmm(factor_ZRk, k_ZkD, dtype).mul_(a.scale), chunk))
            if sum_k is not None:
                _add_product(sum_k, chunk, factor_ZRk, q_ZRD, a.scale)
            bias_gradients.add(heads, chunk, heads.unflatten(grad_ZRk, chunk))
        for grad, total in zip(grads, (sum_k, sum_v), strict=True):
            if grad is not None and total is not None and total is not grad:
                grad.copy_(total)
    return grad_q, grad_k, grad_v, *bias_gradients.result()


def _add_product(total: Tensor, chunk: _QueryChunk, a_ZRk: Tensor, b_ZRx: Tensor, scale: float) -> None:
    """total [batch, key/value heads, K, x] += a^T @ b * scale at the chunk's keys."""
    a_ZkR = a_ZRk.transpose(1, 2)
    if chunk.index is None and a_ZkR.shape[0] == 1 and total.dtype == a_ZkR.dtype:
        # Without a temporary for the product, which would grow with the number of keys.
        chunk.take(total[0, 0], 0).addmm_(a_ZkR[0], b_ZRx[0], alpha=scale)
    else:
        product = _bmm(a_ZkR, b_ZRx, total.dtype).mul_(scale)
        chunk.add(total, product.unflatten(0, total.shape[:2]), 2)


class _BiasGradients:
    """Gradients of the bias, or of the tensors that a bias function lists, summed over chunks.

    The sums are in at least fp32: in half precision they would stop growing.
    """

    def __init__(self, a: AttentionArguments, wanted: tuple[bool, ...]) -> None:
        self.a, self.wanted = a, wanted
        self.tensors = [
            x for x, want in zip((a.bias, *a.bias_tensors), wanted, strict=True) if want and x is not None
        ]
        self.sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, _compute_dtype(a))) for x in self.tensors
        ]

    def add(self, heads: _HeadSlice, chunk: _QueryChunk, grad_BHQK: Tensor) -> None:
        if not self.sums:
            return
        if self.a.bias is not None:
            rows = _bias_rows(self.sums[0], heads.batch, heads.query_heads, chunk)
            broadcast = [dim for dim, size in enumerate(self.a.bias.shape) if size == 1]
            part = grad_BHQK.sum(broadcast, keepdim=True) if broadcast else grad_BHQK
            chunk.add(rows, part, 3) if rows.shape[3] > 1 else rows.add_(part)
            return
        with torch.enable_grad():
            values = _bias_values(self.a, heads.batch, heads.query_heads, chunk)
        assert values is not None
        if not values.requires_grad:
            return
        grad = grad_BHQK.sum_to_size(values.shape).to(values.dtype)
        parts = torch.autograd.grad(values, self.tensors, grad, allow_unused=True)
        for total, part in zip(self.sums, parts, strict=True):
            if part is not None:
                total.add_(part)

    def result(self) -> list[Tensor | None]:
        sums = (total.to(x.dtype) for total, x in zip(self.sums, self.tensors, strict=True))
        return [next(sums) if want else None for want in self.wanted]
