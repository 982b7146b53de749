"""How the chunked implementation cuts the scores into tiles, and which keys each tile needs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.softmax_attention.problem import Problem
from oomph.units import MiB

DEFAULT_BUDGET = 256 * MiB  # fewer, larger launches; small beside the memory of a GPU
# Tiles that stay in the last level of cache are worth more than fewer, larger products.
DEFAULT_BUDGET_ON_CPU = 32 * MiB
# On a CPU, or causal: tall enough for an efficient matrix product; causal tiles waste half of their height.
QUERIES_PER_TILE = 256
_SCORE_BUFFERS = 3  # scores and weights, or weights and their gradient, and room for the bias
_FUNCTION_BUFFERS = 3  # what a bias function holds on the way to its result, beyond that room


@dataclass(frozen=True)
class TileSizes:
    """One tile: so many batch entries x key/value heads (all their query heads) x queries."""

    batch: int
    heads: int
    queries: int


@dataclass(frozen=True, eq=False)
class QueryTile:
    """Queries start:stop and the keys they may see: first:last where contiguous, else those of `index`.

    Keys are in rising order. From place `cut` on, some of them lie after the tile's first query, so that
    causality must be checked there; None where it never forbids.
    """

    start: int
    stop: int
    first: int
    last: int
    index: Tensor | None
    cut: int | None

    @property
    def keys(self) -> int:
        return self.last - self.first if self.index is None else self.index.shape[0]

    def take(self, tensor: Tensor, dim: int) -> Tensor:
        """The tile's keys of a tensor that has all of them along `dim`."""
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


def tile_sizes(p: Problem) -> TileSizes:
    """Tiles whose temporary memory stays within the budget (but never less than one query of one head)."""
    default = DEFAULT_BUDGET_ON_CPU if p.q.device.type == "cpu" else DEFAULT_BUDGET
    itemsize = 8 if p.q.dtype == torch.float64 else 4
    buffers = _SCORE_BUFFERS + (_FUNCTION_BUFFERS if p.bias_function is not None else 0)
    scores = (p.memory_budget or default) // (buffers * itemsize)
    per_query = max(1, p.group * p.keys)
    tallest = QUERIES_PER_TILE if p.q.device.type == "cpu" or p.cuts_future else p.queries
    queries = max(1, min(p.queries, tallest, scores // per_query))
    if p.pattern is not None:
        queries = max(1, min(queries, p.pattern.block))
        per_query = max(1, p.group * _most_keys(p))
    pairs = max(1, scores // (per_query * queries))  # of batch entry and key/value head
    heads = min(pairs, p.k.shape[1])
    batch = max(1, min(pairs // p.k.shape[1], p.k.shape[0]))
    return TileSizes(batch, heads, queries)


def query_tiles(p: Problem, queries: int) -> list[QueryTile]:
    if p.pattern is None:
        starts = range(0, p.queries, queries)
        return [_dense_tile(p, start, min(start + queries, p.queries)) for start in starts]
    return list(_pattern_tiles(p, queries))


def _dense_tile(p: Problem, start: int, stop: int) -> QueryTile:
    if not p.cuts_future:
        return QueryTile(start, stop, 0, p.keys, None, None)
    last = max(0, stop + p.offset)  # the last query of the tile sees its own position
    return QueryTile(start, stop, 0, last, None, max(0, min(last, start + p.offset + 1)))


def _pattern_tiles(p: Problem, queries: int) -> Iterator[QueryTile]:
    assert p.pattern is not None
    size, total = p.pattern.block, -(-p.keys // p.pattern.block)
    all_keys = torch.arange(p.keys, device=p.q.device)
    start = 0
    while start < p.queries:
        position = start + p.offset
        block = position // size
        # A tile stays within one block of positions: all its queries see the same blocks of keys.
        stop = min(p.queries, start + queries, (block + 1) * size - p.offset)
        kept = p.pattern.key_blocks(block, total, p.cuts_future)
        cut = _kept_up_to(kept, position, size) if p.cuts_future else None
        if not kept:
            yield QueryTile(start, stop, 0, 0, None, None)
        elif kept[-1] - kept[0] + 1 == len(kept):
            yield QueryTile(start, stop, kept[0] * size, min(p.keys, (kept[-1] + 1) * size), None, cut)
        else:
            runs = [all_keys[first * size : (last + 1) * size] for first, last in _runs(kept)]
            yield QueryTile(start, stop, 0, 0, torch.cat(runs), cut)
        start = stop


def _kept_up_to(kept: list[int], position: int, size: int) -> int:
    """How many keys of the kept blocks are at `position` or before it."""
    return sum(min(size, max(0, position + 1 - block * size)) for block in kept)


def _runs(blocks: list[int]) -> list[tuple[int, int]]:
    """Rising numbers as (first, last) of each unbroken run."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] + 1 == block:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    return runs


def _most_keys(p: Problem) -> int:
    """The most keys that any query of a pattern sees."""
    assert p.pattern is not None
    size, total = p.pattern.block, -(-p.keys // p.pattern.block)
    first, last = p.offset // size, (p.keys - 1) // size
    counts = (len(p.pattern.key_blocks(i, total, p.cuts_future)) for i in range(first, last + 1))
    return min(p.keys, max(counts, default=0) * size)


def bias_part(bias_BHQK: Tensor, batch: slice, query_heads: slice, tile: QueryTile) -> Tensor:
    """The part of a bias (or of its gradient) that falls on a tile; axes of size 1 stay as they are."""
    b, h, q, k = (size > 1 for size in bias_BHQK.shape)
    part = bias_BHQK[
        batch if b else slice(None),
        query_heads if h else slice(None),
        slice(tile.start, tile.stop) if q else slice(None),
    ]
    return tile.take(part, 3) if k else part


def bias_values(p: Problem, batch: slice, query_heads: slice, tile: QueryTile) -> Tensor:
    """What the bias function gives for a tile."""
    assert p.bias_function is not None
    device = p.q.device

    def indices(span: slice, shape: tuple[int, ...]) -> Tensor:
        return torch.arange(span.start, span.stop, device=device).view(shape)

    return p.bias_function(
        indices(batch, (-1, 1, 1, 1)),
        indices(query_heads, (1, -1, 1, 1)),
        indices(slice(tile.start, tile.stop), (1, 1, -1, 1)),
        tile.key_index(device).view(1, 1, 1, -1),
    )
