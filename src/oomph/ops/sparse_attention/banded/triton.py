"""Flash attention over a band of keys, forward and backward, for the compressed keys and for the window.

Key j stands for the tokens j * STRIDE .. j * STRIDE + SPAN - 1, and token t sees it if the last of them is
not after t, and (WINDOW > 0) if t - j < WINDOW. The compressed keys are a staircase without a window; tokens
themselves are STRIDE = SPAN = 1. All keys that a tile of tokens sees form a range, cut at both its ends.

Scores are in units of log 2, because exp2 is one instruction. The log-sum-exp of a token without a key is
+inf, which makes its weights exp2(score - inf) = 0 in backward. Per-row numbers are [B, Q heads, T] in fp32.

With the gate outside the softmax, the gradient of a score is gate * weight * (grad . v - delta), where delta
= grad . out is at the same time the gate's gradient.
"""

import triton
import triton.language as tl


@triton.jit
def seen_keys(t, n_keys, SPAN: tl.constexpr, STRIDE: tl.constexpr):
    """How many keys, counted from the first, are not after token t."""
    # Division rounds towards 0, which for what lies below it is as good as down.
    return tl.minimum(tl.maximum((t + 1 - SPAN + STRIDE) // STRIDE, 0), n_keys)


@triton.jit
def rows_of(base, stride, rows, count, width, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of a matrix with contiguous rows; zeros outside."""
    columns = tl.arange(0, BLOCK_D)
    inside = ((rows >= 0) & (rows < count))[:, None] & (columns < width)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, stride, rows, count, width, values, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    place = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _sees(t, key, n_keys, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    seen = (key * STRIDE + SPAN - 1 <= t) & (key < n_keys)
    if WINDOW > 0:
        seen &= key > t - WINDOW
    return seen


@triton.jit
def _forward_keys(
    acc, total, highest, q_tile, k, k_n, v, v_n, t, first, last, n_keys, width, scale, CUT: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_tile = rows_of(k, k_n, key, n_keys, width, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if CUT:
            seen = _sees(t[:, None], key[None, :], n_keys, SPAN, STRIDE, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        # A row that has met no key yet: -inf - -inf would be NaN.
        pivot = tl.where(higher == float("-inf"), 0.0, higher) if CUT else higher
        weights = tl.exp2(scores * scale - pivot[:, None])
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = rows_of(v, v_n, key, n_keys, width, BLOCK_D)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        highest = higher
    return acc, total, highest


@triton.jit
def _tile_of_tokens(tokens, heads, BLOCK_M: tl.constexpr):
    """(batch, head, first token) of a program. The last tokens, which see most, come first."""
    tiles = tl.cdiv(tokens, BLOCK_M)
    per_tile = tl.num_programs(0) // tiles
    z, tile = tl.program_id(0) % per_tile, tl.program_id(0) // per_tile
    return (z // heads).to(tl.int64), (z % heads).to(tl.int64), (tiles - 1 - tile) * BLOCK_M


@triton.jit
def _keys_of_tile(
    first, tokens, n_keys, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(start, whole, stop): the tiles of keys from start to whole are seen by all rows, the rest is cut.

    In a window none counts as whole: few tiles are, and one loop instead of three leaves more registers.
    """
    stop = seen_keys(tl.minimum(first + BLOCK_M, tokens) - 1, n_keys, SPAN, STRIDE)
    if WINDOW > 0:
        start = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = start
    else:
        start = 0
        whole = seen_keys(first, n_keys, SPAN, STRIDE) // BLOCK_N * BLOCK_N
    return start, whole, stop


@triton.jit
def band_forward(
    q, q_b, q_t, q_h,
    k, k_b, k_n, k_h,
    v, v_b, v_n, v_h,
    out,  # [B, T, Q, D], contiguous
    lse,
    tokens, n_keys, heads, group, width, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens of a query head. `scale` is that of the scores, times log2(e)."""
    batch, head, first = _tile_of_tokens(tokens, heads, BLOCK_M)
    t = first + tl.arange(0, BLOCK_M)
    q_tile = rows_of(q + batch * q_b + head * q_h, q_t, t, tokens, width, BLOCK_D)
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    start, whole, stop = _keys_of_tile(first, tokens, n_keys, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if WINDOW == 0:
        acc, total, highest = _forward_keys(
            acc, total, highest, q_tile, k, k_n, v, v_n, t, start, whole, n_keys, width, scale,
            False, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    acc, total, highest = _forward_keys(
        acc, total, highest, q_tile, k, k_n, v, v_n, t, whole, stop, n_keys, width, scale,
        True, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    without_key = total == 0.0
    acc = acc / tl.where(without_key, 1.0, total)[:, None]
    store_rows(out + (batch * tokens * heads + head) * width, heads * width, t, tokens, width, acc, BLOCK_D)
    value = tl.where(without_key, float("inf"), highest + tl.log2(tl.where(without_key, 1.0, total)))
    tl.store(lse + (batch * heads + head) * tokens + t, value, mask=t < tokens)


@triton.jit
def _query_gradient_keys(
    acc, q_tile, grad_tile, lse, delta, k, k_n, v, v_n, t, first, last, n_keys, width, scale,
    CUT: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_tile = rows_of(k, k_n, key, n_keys, width, BLOCK_D)
        v_tile = rows_of(v, v_n, key, n_keys, width, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        slope = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        weights = tl.exp2(scores * scale - lse[:, None])
        if CUT:
            seen = _sees(t[:, None], key[None, :], n_keys, SPAN, STRIDE, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        slope = (weights * (slope - delta[:, None])).to(k_tile.dtype)
        acc = tl.dot(slope, k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def band_query_gradient(
    q, q_b, q_t, q_h,
    k, k_b, k_n, k_h,
    v, v_b, v_n, v_h,
    grad, grad_b, grad_t, grad_h,
    dq,  # [B, T, Q, D], contiguous
    lse, delta, gate,
    tokens, n_keys, heads, group, width, scale, natural_scale, ADD: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `band_forward`. ADD: dq holds another branch's already."""
    batch, head, first = _tile_of_tokens(tokens, heads, BLOCK_M)
    t = first + tl.arange(0, BLOCK_M)
    q_tile = rows_of(q + batch * q_b + head * q_h, q_t, t, tokens, width, BLOCK_D)
    grad_tile = rows_of(grad + batch * grad_b + head * grad_h, grad_t, t, tokens, width, BLOCK_D)
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    row = (batch * heads + head) * tokens + t
    lse_tile = tl.load(lse + row, mask=t < tokens, other=float("inf"))
    delta_tile = tl.load(delta + row, mask=t < tokens, other=0.0)
    start, whole, stop = _keys_of_tile(first, tokens, n_keys, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if WINDOW == 0:
        acc = _query_gradient_keys(
            acc, q_tile, grad_tile, lse_tile, delta_tile, k, k_n, v, v_n, t, start, whole, n_keys, width,
            scale, False, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    acc = _query_gradient_keys(
        acc, q_tile, grad_tile, lse_tile, delta_tile, k, k_n, v, v_n, t, whole, stop, n_keys, width, scale,
        True, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    factor = tl.load(gate + row, mask=t < tokens, other=0.0) * natural_scale
    acc *= factor[:, None]
    dq += (batch * tokens * heads + head) * width
    if ADD:
        acc += rows_of(dq, heads * width, t, tokens, width, BLOCK_D).to(tl.float32)
    store_rows(dq, heads * width, t, tokens, width, acc, BLOCK_D)


@triton.jit
def _key_gradient_tokens(
    dk_tile, dv_tile, k_tile, v_tile, q, q_t, grad, grad_t, lse, delta, gate, key, first, last, tokens,
    n_keys, width, scale, CUT: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_M):
        t = start + tl.arange(0, BLOCK_M)
        q_tile = rows_of(q, q_t, t, tokens, width, BLOCK_D)
        grad_tile = rows_of(grad, grad_t, t, tokens, width, BLOCK_D)
        lse_tile = tl.load(lse + t, mask=t < tokens, other=float("inf"))
        delta_tile = tl.load(delta + t, mask=t < tokens, other=0.0)
        gate_tile = tl.load(gate + t, mask=t < tokens, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [keys, tokens]
        weights = tl.exp2(scores * scale - lse_tile[None, :])
        if CUT:
            seen = _sees(t[None, :], key[:, None], n_keys, SPAN, STRIDE, WINDOW)
            weights = tl.where(seen, weights, 0.0)
        weights *= gate_tile[None, :]
        dv_tile = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv_tile, input_precision=PRECISION)
        slope = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        slope = (weights * (slope - delta_tile[None, :])).to(q_tile.dtype)
        dk_tile = tl.dot(slope, q_tile, dk_tile, input_precision=PRECISION)
    return dk_tile, dv_tile


@triton.jit
def band_key_gradient(
    q, q_b, q_t, q_h,
    k, k_b, k_n, k_h,
    v, v_b, v_n, v_h,
    grad, grad_b, grad_t, grad_h,
    dk, dv,  # [B, keys, heads / HEADS, D], contiguous
    lse, delta, gate,
    tokens, n_keys, heads, group, width, scale, natural_scale, HEADS: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of keys and HEADS query heads that share a key head; the first keys come first."""
    outs = heads // HEADS
    program, tiles = tl.program_id(0), tl.cdiv(n_keys, BLOCK_N)
    z = program % (tl.num_programs(0) // tiles)
    batch, part = (z // outs).to(tl.int64), (z % outs).to(tl.int64)
    first_key = program // (tl.num_programs(0) // tiles) * BLOCK_N
    key = first_key + tl.arange(0, BLOCK_N)
    key_head = part * HEADS // group
    k_tile = rows_of(k + batch * k_b + key_head * k_h, k_n, key, n_keys, width, BLOCK_D)
    v_tile = rows_of(v + batch * v_b + key_head * v_h, v_n, key, n_keys, width, BLOCK_D)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Tokens from `start` see the first key of the tile; from `whole` to `stop` they see all of them.
    last_key = tl.minimum(first_key + BLOCK_N, n_keys) - 1
    start = (first_key * STRIDE + SPAN - 1) // BLOCK_M * BLOCK_M
    if WINDOW > 0:
        stop = tl.minimum(tokens, last_key + WINDOW)
        whole = stop
    else:
        stop = tokens
        whole = tl.cdiv(last_key * STRIDE + SPAN - 1, BLOCK_M) * BLOCK_M
        if last_key + 1 < first_key + BLOCK_N:
            whole = stop  # a tile that is not full is cut everywhere
        whole = tl.minimum(whole, stop)
    for number in range(HEADS):
        head = part * HEADS + number
        q_head = q + batch * q_b + head * q_h
        grad_head = grad + batch * grad_b + head * grad_h
        row = (batch * heads + head) * tokens
        dk_tile, dv_tile = _key_gradient_tokens(
            dk_tile, dv_tile, k_tile, v_tile, q_head, q_t, grad_head, grad_t, lse + row, delta + row,
            gate + row, key, start, whole, tokens, n_keys, width, scale,
            True, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_D, PRECISION,
        )  # fmt: skip
        if WINDOW == 0:
            dk_tile, dv_tile = _key_gradient_tokens(
                dk_tile, dv_tile, k_tile, v_tile, q_head, q_t, grad_head, grad_t, lse + row, delta + row,
                gate + row, key, whole, stop, tokens, n_keys, width, scale,
                False, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_D, PRECISION,
            )  # fmt: skip
    place = (batch * n_keys * outs + part) * width
    store_rows(dk + place, outs * width, key, n_keys, width, dk_tile * natural_scale, BLOCK_D)
    store_rows(dv + place, outs * width, key, n_keys, width, dv_tile, BLOCK_D)
