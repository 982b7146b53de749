"""Kernels of block-sparse attention with online softmax, and with the locality bias.

Keys are cut into blocks of BLOCK positions. A query at position p stands in block i = p // BLOCK and sees

    the window: blocks i - window .. i + window, and
    HAS_GLOBAL: the blocks 0, stride, 2 * stride, ...

Attention without a pattern is the case of a window that holds everything. A tile of BLOCK_M queries lies
within one block of positions (BLOCK_M divides BLOCK), so all its rows see the same keys, which are read in
tiles of BLOCK_N (which divides BLOCK too). Seen from the keys, the queries of a block are always one unbroken
range.

With POINT_SIZE > 0, strength * |t - s|^2 is taken from the scores: t [B, POINT_SIZE, Q] are the points of the
queries and s those of the keys, both fp32 and without a gradient.

Scores are in units of log 2 (`scale` and `strength` hold the factor), because exp2 is one instruction. The
log-sum-exp of a row without a key is +inf, which makes its weights exp2(score - inf) = 0 in backward.
"""

import triton
import triton.language as tl

from oomph.ops.softmax_attention.triton_tiles import (
    allowed,
    query_plan,
    rows_of,
    scores_of,
    store_rows,
    tile_start,
)

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _forward_tiles(
    acc, total, highest, q, k, k_stride, v, v_stride, seen, t, s, position, queries, keys, first, last,
    start, stop, stride, n_seen, head_size, value_size, scale, strength,
    CUT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for number in range(first, last):
        key = tile_start(number, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
        k_tile = rows_of(k, k_stride, key, n_seen, head_size, BLOCK_N, BLOCK_D)
        scores = scores_of(
            q, k_tile, scale, t, position - (keys - queries), queries, s, key + tl.arange(0, BLOCK_N), keys,
            strength, POINT_SIZE, PRECISION,
        )  # fmt: skip
        scores = allowed(scores, key, position, n_seen, seen, CUT, CAUSAL, HAS_MASK, BLOCK_N)
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A row that has met no key yet: -inf - -inf would be NaN.
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = rows_of(v, v_stride, key, n_seen, value_size, BLOCK_N, BLOCK_E)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        highest = higher
    return acc, total, highest


@triton.jit
def forward(
    q, q_batch, q_head, q_stride,
    k, k_batch, k_head, k_stride,
    v, v_batch, v_head, v_stride,
    out, out_batch, out_head, out_stride,
    lse,  # [B, H, Q] fp32, in units of log 2
    lengths, seen, t, t_batch, s, s_batch,
    queries, keys, heads, group, head_size, value_size, window, stride, scale, strength,
    CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries of a head. `scale` is that of the scores, times log2(e)."""
    batch, head, query, position, n_seen, start, stop, n_whole, count = query_plan(
        tl.program_id(0), queries, keys, heads, window, stride, lengths,
        CAUSAL, HAS_GLOBAL, HAS_LENGTHS, BLOCK, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    q_tile = rows_of(
        q + batch * q_batch + head * q_head, q_stride, query, queries, head_size, BLOCK_M, BLOCK_D
    )
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    seen += batch * keys
    t += batch * t_batch
    s += batch * s_batch
    at = tl.arange(0, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    acc, total, highest = _forward_tiles(
        acc, total, highest, q_tile, k, k_stride, v, v_stride, seen, t, s, position + at, queries, keys,
        0, n_whole, start, stop, stride, n_seen, head_size, value_size, scale, strength,
        False, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    acc, total, highest = _forward_tiles(
        acc, total, highest, q_tile, k, k_stride, v, v_stride, seen, t, s, position + at, queries, keys,
        n_whole, count, start, stop, stride, n_seen, head_size, value_size, scale, strength,
        True, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    without_key = total == 0.0
    acc = acc / tl.where(without_key, 1.0, total)[:, None]
    out += batch * out_batch + head * out_head
    store_rows(out, out_stride, query, queries, value_size, acc, BLOCK_M, BLOCK_E)
    value = tl.where(without_key, float("inf"), highest + tl.log2(tl.where(without_key, 1.0, total)))
    rows = query + at
    place = lse + (batch * heads + head) * queries + rows
    tl.store(place, value, mask=(rows >= 0) & (rows < queries))


@triton.jit
def row_products(
    out, out_batch, out_head, out_stride,
    grad, grad_batch, grad_head, grad_stride,
    delta,  # [B, H, Q] fp32
    queries, heads, value_size,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """delta = the sum of out * grad over the head size."""
    per_head = tl.cdiv(queries, ROWS)
    z = (tl.program_id(0) // per_head).to(tl.int64)
    first = (tl.program_id(0) % per_head) * ROWS
    batch, head = z // heads, z % heads
    out += batch * out_batch + head * out_head
    grad += batch * grad_batch + head * grad_head
    o = rows_of(out, out_stride, first, queries, value_size, ROWS, BLOCK_E)
    g = rows_of(grad, grad_stride, first, queries, value_size, ROWS, BLOCK_E)
    rows = first + tl.arange(0, ROWS)
    value = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + z * queries + rows, value, mask=rows < queries)


@triton.jit
def _query_gradient_tiles(
    acc, q, grad, lse, delta, k, k_stride, v, v_stride, seen, t, s, position, queries, keys, first, last,
    start, stop, stride, n_seen, head_size, value_size, scale, strength,
    CUT: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for number in range(first, last):
        key = tile_start(number, start, stop, stride, HAS_GLOBAL, BLOCK, BLOCK_N)
        k_tile = rows_of(k, k_stride, key, n_seen, head_size, BLOCK_N, BLOCK_D)
        v_tile = rows_of(v, v_stride, key, n_seen, value_size, BLOCK_N, BLOCK_E)
        scores = scores_of(
            q, k_tile, scale, t, position - (keys - queries), queries, s, key + tl.arange(0, BLOCK_N), keys,
            strength, POINT_SIZE, PRECISION,
        )  # fmt: skip
        scores = allowed(scores, key, position, n_seen, seen, CUT, CAUSAL, HAS_MASK, BLOCK_N)
        weights = tl.exp2(scores - lse[:, None])
        slope = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION) - delta[:, None]
        acc = tl.dot((weights * slope).to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def query_gradient(
    q, q_batch, q_head, q_stride,
    k, k_batch, k_head, k_stride,
    v, v_batch, v_head, v_stride,
    grad, grad_batch, grad_head, grad_stride,
    dq, dq_batch, dq_head, dq_stride,
    lse, delta, lengths, seen, t, t_batch, s, s_batch,
    queries, keys, heads, group, head_size, value_size, window, stride, scale, strength,
    CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of queries of a head, over the same tiles of keys as in `forward`."""
    batch, head, query, position, n_seen, start, stop, n_whole, count = query_plan(
        tl.program_id(0), queries, keys, heads, window, stride, lengths,
        CAUSAL, HAS_GLOBAL, HAS_LENGTHS, BLOCK, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    q_tile = rows_of(
        q + batch * q_batch + head * q_head, q_stride, query, queries, head_size, BLOCK_M, BLOCK_D
    )
    grad += batch * grad_batch + head * grad_head
    grad_tile = rows_of(grad, grad_stride, query, queries, value_size, BLOCK_M, BLOCK_E)
    k += batch * k_batch + (head // group) * k_head
    v += batch * v_batch + (head // group) * v_head
    seen += batch * keys
    t += batch * t_batch
    s += batch * s_batch
    at = tl.arange(0, BLOCK_M)
    rows = query + at
    inside = (rows >= 0) & (rows < queries)
    row = (batch * heads + head) * queries + rows
    lse_rows = tl.load(lse + row, mask=inside, other=float("inf"))
    delta_rows = tl.load(delta + row, mask=inside, other=0.0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    acc = _query_gradient_tiles(
        acc, q_tile, grad_tile, lse_rows, delta_rows, k, k_stride, v, v_stride, seen, t, s,
        position + at, queries, keys,
        0, n_whole, start, stop, stride, n_seen, head_size, value_size, scale, strength,
        False, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    acc = _query_gradient_tiles(
        acc, q_tile, grad_tile, lse_rows, delta_rows, k, k_stride, v, v_stride, seen, t, s,
        position + at, queries, keys,
        n_whole, count, start, stop, stride, n_seen, head_size, value_size, scale, strength,
        True, CAUSAL, HAS_MASK, HAS_GLOBAL, BLOCK, BLOCK_N, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
    )  # fmt: skip
    dq += batch * dq_batch + head * dq_head
    store_rows(dq, dq_stride, query, queries, head_size, acc * (scale / LOG2_E), BLOCK_M, BLOCK_D)


@triton.jit
def _key_gradient_tiles(
    dk, dv, k, v, q, q_stride, grad, grad_stride, lse, delta, t, s, keys_at, queries, keys, first, last, end,
    head_size, value_size, scale, strength,
    CUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries first .. last in tiles of BLOCK_M; those from `end` on do not count. Scores are transposed."""
    at = tl.arange(0, BLOCK_M)
    for query in range(first, last, BLOCK_M):
        inside = (query + at) < end
        q_tile = rows_of(q, q_stride, query, end, head_size, BLOCK_M, BLOCK_D)
        grad_tile = rows_of(grad, grad_stride, query, end, value_size, BLOCK_M, BLOCK_E)
        lse_rows = tl.load(lse + query + at, mask=inside, other=float("inf"))
        delta_rows = tl.load(delta + query + at, mask=inside, other=0.0)
        scores = scores_of(
            k, q_tile, scale, s, keys_at, keys, t, query + at, queries, strength, POINT_SIZE, PRECISION
        )
        if CUT:
            position = query + at + keys - queries
            scores = tl.where(keys_at[:, None] <= position[None, :], scores, float("-inf"))
        weights = tl.exp2(scores - lse_rows[None, :])
        dv = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
        slope = tl.dot(v, tl.trans(grad_tile), input_precision=PRECISION) - delta_rows[None, :]
        dk = tl.dot((weights * slope).to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradient(
    q, q_batch, q_head, q_stride,
    k, k_batch, k_head, k_stride,
    v, v_batch, v_head, v_stride,
    grad, grad_batch, grad_head, grad_stride,
    dk, dk_batch, dk_head, dk_stride,
    dv, dv_batch, dv_head, dv_stride,
    lse, delta, lengths, seen, t, t_batch, s, s_batch,
    queries, keys, heads, group, head_size, value_size, window, stride, scale, strength,
    CAUSAL: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GLOBAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, POINT_SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of keys of a key/value head: adds up over the queries of all its query heads.

    Every key has a row of its own in the sums, so keys that may not be seen are cleared once, at the end.
    """
    offset = keys - queries
    n_tiles = tl.cdiv(keys, BLOCK_N)
    key = (tl.program_id(0) % n_tiles) * BLOCK_N
    z = (tl.program_id(0) // n_tiles).to(tl.int64)
    batch, key_head = z // (heads // group), z % (heads // group)
    own = key // BLOCK
    # The blocks of positions that see this one, cut to those which have queries.
    first = tl.maximum((own - window) * BLOCK - offset, 0)
    end = tl.minimum((own + window + 1) * BLOCK - offset, queries)
    if HAS_GLOBAL:
        to_all = own % stride == 0
        first = tl.where(to_all, 0, first)
        end = tl.where(to_all, queries, end)
    whole = first
    if CAUSAL:
        first = tl.maximum(first, key - offset)
        whole = first + tl.cdiv(tl.maximum(key + BLOCK_N - 1 - offset - first, 0), BLOCK_M) * BLOCK_M
    n_seen = keys
    if HAS_LENGTHS:
        n_seen = tl.minimum(tl.load(lengths + batch).to(tl.int32), keys)
        end = tl.where(key < n_seen, end, first)
    k_tile = rows_of(
        k + batch * k_batch + key_head * k_head, k_stride, key, keys, head_size, BLOCK_N, BLOCK_D
    )
    v_tile = rows_of(
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
            dk_tile, dv_tile = _key_gradient_tiles(
                dk_tile, dv_tile, k_tile, v_tile, q_head_at, q_stride, grad_head_at, grad_stride, lse + row,
                delta + row, t, s, keys_at, queries, keys, first, tl.minimum(whole, end), end,
                head_size, value_size, scale, strength,
                True, BLOCK_M, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
            )  # fmt: skip
        dk_tile, dv_tile = _key_gradient_tiles(
            dk_tile, dv_tile, k_tile, v_tile, q_head_at, q_stride, grad_head_at, grad_stride, lse + row,
            delta + row, t, s, keys_at, queries, keys, whole, end, end,
            head_size, value_size, scale, strength,
            False, BLOCK_M, BLOCK_D, BLOCK_E, POINT_SIZE, PRECISION,
        )  # fmt: skip
    may_be_seen = keys_at < n_seen
    if HAS_MASK:
        may_be_seen &= tl.load(seen + batch * keys + keys_at, mask=may_be_seen, other=0) != 0
    dk_tile = tl.where(may_be_seen[:, None], dk_tile * (scale / LOG2_E), 0.0)
    dv_tile = tl.where(may_be_seen[:, None], dv_tile, 0.0)
    dk += batch * dk_batch + key_head * dk_head
    dv += batch * dv_batch + key_head * dv_head
    store_rows(dk, dk_stride, key, keys, head_size, dk_tile, BLOCK_N, BLOCK_D)
    store_rows(dv, dv_stride, key, keys, value_size, dv_tile, BLOCK_N, BLOCK_E)
