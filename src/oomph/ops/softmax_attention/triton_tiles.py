# mypy: allow-untyped-defs, allow-incomplete-defs
# (A kernel's arguments are typed when it is compiled, by what it is called with.)
"""What the attention kernels share: which tiles of keys a tile of queries sees, rows, scores, masks."""

import triton
import triton.language as tl


@triton.jit
def _global_tiles_before(key, stride, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles of the blocks 0, stride, 2 * stride, ... start before `key`."""
    per_block: tl.constexpr = BLOCK // BLOCK_N
    whole = key // (stride * BLOCK)
    rest = tl.cdiv(key - whole * (stride * BLOCK), BLOCK_N)
    return whole * per_block + tl.minimum(rest, per_block)


@triton.jit
def _tiles_before(
    key, start, stop, stride, HAS_GLOBAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """How many of the tiles that a query sees start before `key`; its window is [start, stop)."""
    key = tl.maximum(key, 0)
    count = tl.cdiv(tl.maximum(tl.minimum(key, stop) - start, 0), BLOCK_N)
    if HAS_GLOBAL:
        count += _global_tiles_before(tl.minimum(key, start), stride, BLOCK, BLOCK_N)
        upto_stop = _global_tiles_before(stop, stride, BLOCK, BLOCK_N)
        count += tl.maximum(_global_tiles_before(key, stride, BLOCK, BLOCK_N) - upto_stop, 0)
    return count


@triton.jit
def tile_start(
    number, start, stop, stride, HAS_GLOBAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The first key of the tile `number`, counted in rising order of keys."""
    if HAS_GLOBAL:
        per_block: tl.constexpr = BLOCK // BLOCK_N
        before = _global_tiles_before(start, stride, BLOCK, BLOCK_N)
        inside = (stop - start) // BLOCK_N
        after = number - before - inside + _global_tiles_before(stop, stride, BLOCK, BLOCK_N)
        column = tl.where(number < before, number, after)
        key = (column // per_block) * (stride * BLOCK) + (column % per_block) * BLOCK_N
        in_window = (number >= before) & (number < before + inside)
        return tl.where(in_window, start + (number - before) * BLOCK_N, key)
    else:
        return start + number * BLOCK_N


@triton.jit
def rows_of(pointer, stride, first, n_rows, width, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first .. first + SIZE of a matrix with contiguous rows; zeros outside of it."""
    row = first + tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    inside = (row >= 0) & (row < n_rows)
    places = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(places, mask=inside[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, stride, first, n_rows, width, values, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = first + tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    inside = (row >= 0) & (row < n_rows)
    places = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    keep = inside[:, None] & (column < width)[None, :]
    tl.store(places, values.to(pointer.dtype.element_ty), mask=keep)


@triton.jit
def allowed(
    scores, key, position, n_seen, seen, CUT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N], -inf where a key is forbidden. Without CUT the tile lies wholly inside."""
    keys = key + tl.arange(0, BLOCK_N)
    if CUT:
        scores = tl.where((keys < n_seen)[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
    if HAS_MASK:
        may_be_seen = tl.load(seen + keys, mask=keys < n_seen, other=0) != 0
        scores = tl.where(may_be_seen[None, :], scores, float("-inf"))
    return scores


@triton.jit
def query_plan(
    pid, queries, keys, heads, window, stride, lengths,
    CAUSAL: tl.constexpr, HAS_GLOBAL: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Which rows a program has, and which tiles of keys.

    (batch, head, first query, its position, number of keys that may be seen, the window's start and stop,
    tiles that need no check, tiles in all)
    """
    offset = keys - queries
    # Positions are negative where there are more queries than keys; division rounds down only from 0 on.
    shift = (queries // BLOCK + 2) * BLOCK
    # Tiles begin at multiples of BLOCK_M among the positions; the first may begin before the first query.
    lowest = (offset + shift) // BLOCK_M
    n_tiles = (keys - 1 + shift) // BLOCK_M - lowest + 1
    tile = pid % n_tiles
    if CAUSAL:
        tile = n_tiles - 1 - tile  # the longest first
    z = (pid // n_tiles).to(tl.int64)
    batch, head = z // heads, z % heads
    position = (lowest + tile) * BLOCK_M - shift
    n_seen = keys
    if HAS_LENGTHS:
        n_seen = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys)
    own = (position + shift) // BLOCK - shift // BLOCK
    last = tl.cdiv(keys, BLOCK) - 1
    start = tl.maximum(own - window, 0) * BLOCK
    stop = tl.maximum((tl.minimum(own + window, last) + 1) * BLOCK, start)
    end, whole = n_seen, n_seen
    if CAUSAL:
        end = tl.minimum(end, position + BLOCK_M)
        whole = tl.minimum(whole, position + 1)
    count = _tiles_before(end, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
    n_whole = _tiles_before(whole - BLOCK_N + 1, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
    return batch, head, position - offset, position, n_seen, start, stop, n_whole, count


@triton.jit
def scores_of(
    rows, columns, scale, row_points, row, n_rows, column_points, column, n_columns, strength,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows @ columns^T * scale - strength * |row's point - column's point|^2, all of it in fp32.

    Points are [POINT_SIZE, n]; POINT_SIZE 0 means that there are none. Differences are taken before they are
    squared: |t|^2 - 2 t.s + |s|^2 would cancel where points are far from the origin.
    """
    scores = tl.dot(rows, tl.trans(columns), input_precision=PRECISION) * scale
    if POINT_SIZE > 0:
        distance = tl.zeros_like(scores)
        for axis in tl.static_range(POINT_SIZE):
            a = tl.load(row_points + axis * n_rows + row, mask=(row >= 0) & (row < n_rows), other=0.0)
            b = tl.load(column_points + axis * n_columns + column, mask=column < n_columns, other=0.0)
            difference = a[:, None] - b[None, :]
            distance += difference * difference
        scores -= distance * strength
    return scores
