"""Triton kernels of block-sparse attention with online softmax, padding and the locality bias.

Positions are divided into blocks of BLOCK. A query at position p, in block i = p // BLOCK, attends to

    the window: blocks i - window .. i + window, and
    HAS_GLOBAL: the blocks 0, stride, 2 * stride, ...

Attention without a pattern has a window that holds everything. A tile of BLOCK_M queries lies within one
block of positions (BLOCK_M divides BLOCK), so all its rows attend to the same keys, which are read in tiles
of BLOCK_N (which divides BLOCK too). The queries that attend to a block of keys are always one range.

With POINT_SIZE > 0, strength * |t - s|^2 is subtracted from the scores: t [B, POINT_SIZE, Q] are the points
of the queries and s those of the keys, both fp32 and without a gradient.

Scores are in base 2 (`scale` and `strength` include log2(e)), because exp2 is one instruction. The
log-sum-exp of a row without keys is +inf, which makes its weights exp2(score - inf) = 0 in backward.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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
    """How many of a query's key tiles start before `key`; its window is [start, stop)."""
    key = tl.maximum(key, 0)
    count = tl.cdiv(tl.maximum(tl.minimum(key, stop) - start, 0), BLOCK_N)
    if HAS_GLOBAL:
        count += _global_tiles_before(tl.minimum(key, start), stride, BLOCK, BLOCK_N)
        upto_stop = _global_tiles_before(stop, stride, BLOCK, BLOCK_N)
        count += tl.maximum(_global_tiles_before(key, stride, BLOCK, BLOCK_N) - upto_stop, 0)
    return count


@triton.jit
def key_tile_start(
    number, start, stop, stride, HAS_GLOBAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The first key of key tile `number`; tiles are in increasing order of keys."""
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
def load_rows(pointer, stride, first, n_rows, width, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows first .. first + SIZE of a matrix with contiguous rows; zeros outside of it."""
    row = first + tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    inside = (row >= 0) & (row < n_rows)
    addresses = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(addresses, mask=inside[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, stride, first, n_rows, width, values, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    row = first + tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    inside = (row >= 0) & (row < n_rows)
    addresses = pointer + row.to(tl.int64)[:, None] * stride + column[None, :]
    keep = inside[:, None] & (column < width)[None, :]
    tl.store(addresses, values.to(pointer.dtype.element_ty), mask=keep)


@triton.jit
def mask_scores(
    scores, key, position, n_keys, key_mask,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M, BLOCK_N], -inf where masked. Without MASKED no bound or causal mask cuts the tile."""
    keys = key + tl.arange(0, BLOCK_N)
    if MASKED:
        scores = tl.where((keys < n_keys)[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(keys[None, :] <= position[:, None], scores, float("-inf"))
    if HAS_MASK:
        is_valid = tl.load(key_mask + keys, mask=keys < n_keys, other=0) != 0
        scores = tl.where(is_valid[None, :], scores, float("-inf"))
    return scores


@triton.jit
def locate_query_tile(
    pid, queries, keys, heads, window, stride,
    CAUSAL: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program's rows and key tiles: (batch, head, first query, its position, start and stop of the window,
    key tiles that need no mask, key tiles in total)."""
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
    own_block = (position + shift) // BLOCK - shift // BLOCK
    last = tl.cdiv(keys, BLOCK) - 1
    start = tl.maximum(own_block - window, 0) * BLOCK
    stop = tl.maximum((tl.minimum(own_block + window, last) + 1) * BLOCK, start)
    end, whole = keys, keys
    if CAUSAL:
        end = tl.minimum(end, position + BLOCK_M)
        whole = tl.minimum(whole, position + 1)
    count = _tiles_before(end, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
    n_whole = _tiles_before(whole - BLOCK_N + 1, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
    return batch, head, position - offset, position, start, stop, n_whole, count


@triton.jit
def compute_scores(
    rows, columns, scale, row_points, row, n_rows, column_points, column, n_columns, strength,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rows @ columns^T * scale - strength * |row's point - column's point|^2, all of it in fp32.

    Points are [POINT_SIZE, n]; POINT_SIZE 0 means that there are none. Differences are
    squared, because |t|^2 - 2 t.s + |s|^2 cancels where points are far from the origin.
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


@triton.jit
def _forward_loop(
    acc, total, highest, q, k, k_stride, v, v_stride, key_mask, t, s, position, queries, keys, first, last,
    start, stop, stride, head_size, value_size, scale, strength,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for number in range(first, last):
        key = key_tile_start(number, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
        k_tile = load_rows(k, k_stride, key, keys, head_size, BLOCK_N, BLOCK_D)
        scores = compute_scores(
            q, k_tile, scale, t, position - (keys - queries), queries, s, key + tl.arange(0, BLOCK_N), keys,
            strength, POINT_SIZE, PRECISION,
        )  # fmt: skip
        scores = mask_scores(scores, key, position, keys, key_mask, MASKED, CAUSAL, HAS_MASK, BLOCK_N)
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row without keys so far: -inf - -inf would be NaN.
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - pivot[:, None])
        rescale = tl.exp2(highest - pivot)
        total = total * rescale + tl.sum(weights, 1)
        v_tile = load_rows(v, v_stride, key, keys, value_size, BLOCK_N, BLOCK_E)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        highest = higher
    return acc, total, highest


@triton.jit
def attention_forward(
    q, q_batch, q_head, q_stride,
    k, k_batch, k_head, k_stride,
    v, v_batch, v_head, v_stride,
    out, out_batch, out_head, out_stride,
    lse,  # [B, H, Q] fp32, in units of log 2
    key_mask, t, t_batch, s, s_batch,
    queries, keys, heads, group, head_size, value_size, window, stride, scale, strength,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries of a head. `scale` is that of the scores, times log2(e)."""
    batch, head, query, position, start, stop, n_whole, count = locate_query_tile(
        tl.program_id(0), queries, keys, heads, window, stride,
        CAUSAL, HAS_GLOBAL, BLOCK, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    q_tile = load_rows(
        q + batch * q_batch + head * q_head, q_stride, query, queries, head_size, BLOCK_M, BLOCK_D
    )
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    key_mask += batch * keys
    t += batch * t_batch
    s += batch * s_batch
    at = tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, total, highest = _forward_loop(
        acc, total, highest, q_tile, k, k_stride, v, v_stride, key_mask, t, s, position + at, queries, keys,
        0, n_whole, start, stop, stride, head_size, value_size, scale, strength,
        False, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    acc, total, highest = _forward_loop(
        acc, total, highest, q_tile, k, k_stride, v, v_stride, key_mask, t, s, position + at, queries, keys,
        n_whole, count, start, stop, stride, head_size, value_size, scale, strength,
        True, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    no_key = total == 0.0
    acc = acc / tl.where(no_key, 1.0, total)[:, None]
    out += batch * out_batch + head * out_head
    store_rows(out, out_stride, query, queries, value_size, acc, BLOCK_M, BLOCK_E)
    value = tl.where(no_key, float("inf"), highest + tl.log2(tl.where(no_key, 1.0, total)))
    rows = query + at
    address = lse + (batch * heads + head) * queries + rows
    tl.store(address, value, mask=(rows >= 0) & (rows < queries))


@triton.jit
def attention_delta(
    out, out_batch, out_head, out_stride,
    grad, grad_batch, grad_head, grad_stride,
    delta,  # [B, H, Q] fp32
    queries, heads, value_size,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """delta = sum(out * grad) over the head size."""
    per_head = tl.cdiv(queries, ROWS)
    z = (tl.program_id(0) // per_head).to(tl.int64)
    first = (tl.program_id(0) % per_head) * ROWS
    batch, head = z // heads, z % heads
    out += batch * out_batch + head * out_head
    grad += batch * grad_batch + head * grad_head
    o = load_rows(out, out_stride, first, queries, value_size, ROWS, BLOCK_E)
    g = load_rows(grad, grad_stride, first, queries, value_size, ROWS, BLOCK_E)
    rows = first + tl.arange(0, ROWS)
    value = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + z * queries + rows, value, mask=rows < queries)


@triton.jit
def _dq_loop(
    acc, q, grad, lse, delta, k, k_stride, v, v_stride, key_mask, t, s, position, queries, keys, first, last,
    start, stop, stride, head_size, value_size, scale, strength,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for number in range(first, last):
        key = key_tile_start(number, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
        k_tile = load_rows(k, k_stride, key, keys, head_size, BLOCK_N, BLOCK_D)
        v_tile = load_rows(v, v_stride, key, keys, value_size, BLOCK_N, BLOCK_E)
        scores = compute_scores(
            q, k_tile, scale, t, position - (keys - queries), queries, s, key + tl.arange(0, BLOCK_N), keys,
            strength, POINT_SIZE, PRECISION,
        )  # fmt: skip
        scores = mask_scores(scores, key, position, keys, key_mask, MASKED, CAUSAL, HAS_MASK, BLOCK_N)
        weights = tl.exp2(scores - lse[:, None])
        d_weights = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION) - delta[:, None]
        acc = tl.dot((weights * d_weights).to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def attention_dq(
    q, q_batch, q_head, q_stride,
    k, k_batch, k_head, k_stride,
    v, v_batch, v_head, v_stride,
    grad, grad_batch, grad_head, grad_stride,
    dq, dq_batch, dq_head, dq_stride,
    lse, delta, key_mask, t, t_batch, s, s_batch,
    queries, keys, heads, group, head_size, value_size, window, stride, scale, strength,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries of a head, over the same key tiles as `attention_forward`."""
    batch, head, query, position, start, stop, n_whole, count = locate_query_tile(
        tl.program_id(0), queries, keys, heads, window, stride,
        CAUSAL, HAS_GLOBAL, BLOCK, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    q_tile = load_rows(
        q + batch * q_batch + head * q_head, q_stride, query, queries, head_size, BLOCK_M, BLOCK_D
    )
    grad += batch * grad_batch + head * grad_head
    grad_tile = load_rows(grad, grad_stride, query, queries, value_size, BLOCK_M, BLOCK_E)
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    key_mask += batch * keys
    t += batch * t_batch
    s += batch * s_batch
    at = tl.arange(0, BLOCK_M)
    rows = query + at
    inside = (rows >= 0) & (rows < queries)
    row = (batch * heads + head) * queries + rows
    lse_rows = tl.load(lse + row, mask=inside, other=float("inf"))
    delta_rows = tl.load(delta + row, mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc = _dq_loop(
        acc, q_tile, grad_tile, lse_rows, delta_rows, k, k_stride, v, v_stride, key_mask, t, s,
        position + at, queries, keys,
        0, n_whole, start, stop, stride, head_size, value_size, scale, strength,
        False, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    acc = _dq_loop(
        acc, q_tile, grad_tile, lse_rows, delta_rows, k, k_stride, v, v_stride, key_mask, t, s,
        position + at, queries, keys,
        n_whole, count, start, stop, stride, head_size, value_size, scale, strength,
        True, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    dq += batch * dq_batch + head * dq_head
    store_rows(dq, dq_stride, query, queries, head_size, acc * (scale / LOG2_E), BLOCK_M, BLOCK_D)


@triton.jit
def _dkdv_loop(
    dk, dv, k, v, q, q_stride, grad, grad_stride, lse, delta, t, s, keys_at, queries, keys, first, last, end,
    head_size, value_size, scale, strength,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries first .. last in tiles of BLOCK_M; those from `end` on are masked. Scores are transposed."""
    at = tl.arange(0, BLOCK_M)
    for query in range(first, last, BLOCK_M):
        inside = (query + at) < end
        q_tile = load_rows(q, q_stride, query, end, head_size, BLOCK_M, BLOCK_D)
        grad_tile = load_rows(grad, grad_stride, query, end, value_size, BLOCK_M, BLOCK_E)
        lse_rows = tl.load(lse + query + at, mask=inside, other=float("inf"))
        delta_rows = tl.load(delta + query + at, mask=inside, other=0.0)
        scores = compute_scores(
            k, q_tile, scale, s, keys_at, keys, t, query + at, queries, strength, POINT_SIZE, PRECISION
        )
        if MASKED:
            position = query + at + keys - queries
            scores = tl.where(keys_at[:, None] <= position[None, :], scores, float("-inf"))
        weights = tl.exp2(scores - lse_rows[None, :])
        dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        d_weights = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION) - delta_rows[None, :]
        dk = tl.dot((weights * d_weights).to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def attention_dkdv(
    q, q_batch, q_head, q_stride,
    k, k_batch, k_head, k_stride,
    v, v_batch, v_head, v_stride,
    grad, grad_batch, grad_head, grad_stride,
    dk, dk_batch, dk_head, dk_stride,
    dv, dv_batch, dv_head, dv_stride,
    lse, delta, key_mask, t, t_batch, s, s_batch,
    queries, keys, heads, group, head_size, value_size, window, stride, scale, strength,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of keys of a key/value head: sums over the queries of all its query heads.

    Masked keys are cleared once, at the end: every key has its own row in the sums.
    """
    offset = keys - queries
    n_tiles = tl.cdiv(keys, BLOCK_N)
    key = (tl.program_id(0) % n_tiles) * BLOCK_N
    z = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, key_head = z // (heads // group), z % (heads // group)
    own_block = key // BLOCK
    # The queries that attend to this block.
    first = tl.maximum((own_block - window) * BLOCK - offset, 0)
    end = tl.minimum((own_block + window + 1) * BLOCK - offset, queries)
    if HAS_GLOBAL:
        is_global = own_block % stride == 0
        first = tl.where(is_global, 0, first)
        end = tl.where(is_global, queries, end)
    whole = first
    if CAUSAL:
        first = tl.maximum(first, key - offset)
        whole = first + tl.cdiv(tl.maximum(key + BLOCK_N - 1 - offset - first, 0), BLOCK_M) * BLOCK_M
    k_tile = load_rows(
        k + batch * k_batch + key_head * k_head, k_stride, key, keys, head_size, BLOCK_N, BLOCK_D
    )
    v_tile = load_rows(
        v + batch * v_batch + key_head * v_head, v_stride, key, keys, value_size, BLOCK_N, BLOCK_E
    )
    t += batch * t_batch
    s += batch * s_batch
    keys_at = key + tl.arange(0, BLOCK_N)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    for member in range(group):
        head = key_head * group + member
        row = (batch * heads + head) * queries
        q_head_at = q + batch * q_batch + head * q_head
        grad_head_at = grad + batch * grad_batch + head * grad_head
        if CAUSAL:
            dk_tile, dv_tile = _dkdv_loop(
                dk_tile, dv_tile, k_tile, v_tile, q_head_at, q_stride, grad_head_at, grad_stride, lse + row,
                delta + row, t, s, keys_at, queries, keys, first, tl.minimum(whole, end), end,
                head_size, value_size, scale, strength,
                True, BLOCK_M, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
            )  # fmt: skip
        dk_tile, dv_tile = _dkdv_loop(
            dk_tile, dv_tile, k_tile, v_tile, q_head_at, q_stride, grad_head_at, grad_stride, lse + row,
            delta + row, t, s, keys_at, queries, keys, whole, end, end,
            head_size, value_size, scale, strength,
            False, BLOCK_M, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
        )  # fmt: skip
    is_valid = keys_at < keys
    if HAS_MASK:
        is_valid &= tl.load(key_mask + batch * keys + keys_at, mask=is_valid, other=0) != 0
    dk_tile = tl.where(is_valid[:, None], dk_tile * (scale / LOG2_E), 0.0)
    dv_tile = tl.where(is_valid[:, None], dv_tile, 0.0)
    dk += batch * dk_batch + key_head * dk_head
    dv += batch * dv_batch + key_head * dv_head
    store_rows(dk, dk_stride, key, keys, head_size, dk_tile, BLOCK_N, BLOCK_D)
    store_rows(dv, dv_stride, key, keys, value_size, dv_tile, BLOCK_N, BLOCK_E)
