# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of the compressed and the sliding-window branch: flash attention over a band of keys.

Key j stands for the tokens j * STRIDE .. j * STRIDE + SPAN - 1. Token t attends to it if the last of them is
not after t and (WINDOW > 0) if t - j < WINDOW. Compressed keys have no window; for the sliding window a key
is a token (STRIDE = SPAN = 1). The keys of a tile of tokens form one range, masked at both its ends.

Scores are in base 2, because exp2 is one instruction. The log-sum-exp of a token without keys is +inf, which
makes its weights exp2(score - inf) = 0 in backward. Per-row tensors are [B, query heads, T] in fp32.

The gate is outside the softmax: the gradient of a score is gate * weight * (grad . v - delta), and
delta = grad . out is also the gradient of the gate.
"""

import triton
import triton.language as tl


@triton.jit
def visible_keys(t, n_keys, SPAN: tl.constexpr, STRIDE: tl.constexpr):
    """How many keys, from the first on, are not after token t."""
    # Division rounds towards 0; negative results are clamped anyway.
    return tl.minimum(tl.maximum((t + 1 - SPAN + STRIDE) // STRIDE, 0), n_keys)


@triton.jit
def load_rows(base, stride, rows, count, head_dim, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of a matrix with contiguous rows; zeros outside."""
    columns = tl.arange(0, BLOCK_D)
    inside = ((rows >= 0) & (rows < count))[:, None] & (columns < head_dim)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(base, stride, rows, count, head_dim, values, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < count)[:, None] & (columns < head_dim)[None, :]
    address = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(address, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _is_visible(t, key, n_keys, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr):
    visible = (key * STRIDE + SPAN - 1 <= t) & (key < n_keys)
    if WINDOW > 0:
        visible &= key > t - WINDOW
    return visible


@triton.jit
def _forward_loop(
    acc, total, highest, q_tile, k, k_n, v, v_n, t, first, last, n_keys, head_dim, scale,
    MASKED: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, k_n, key, n_keys, head_dim, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if MASKED:
            visible = _is_visible(t[:, None], key[None, :], n_keys, SPAN, STRIDE, WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        # A row without keys so far: -inf - -inf would be NaN.
        pivot = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores * scale - pivot[:, None])
        rescale = tl.exp2(highest - pivot)
        total = total * rescale + tl.sum(weights, 1)
        v_tile = load_rows(v, v_n, key, n_keys, head_dim, BLOCK_D)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
        highest = higher
    return acc, total, highest


@triton.jit
def _locate_token_tile(tokens, heads, BLOCK_M: tl.constexpr):
    """(batch, head, first token) of a program. The last tokens, which have the most keys, come first."""
    tiles = tl.cdiv(tokens, BLOCK_M)
    per_tile = tl.num_programs(0) // tiles
    z, tile = tl.program_id(0) % per_tile, tl.program_id(0) // per_tile
    return (z // heads).to(tl.int64), (z % heads).to(tl.int64), (tiles - 1 - tile) * BLOCK_M


@triton.jit
def _key_range(
    first, tokens, n_keys, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(start, whole, stop): all rows attend to all keys from start to whole; from there on keys are masked.

    With a window everything is masked: few tiles are whole, and a single loop leaves more registers.
    """
    stop = visible_keys(tl.minimum(first + BLOCK_M, tokens) - 1, n_keys, SPAN, STRIDE)
    if WINDOW > 0:
        start = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = start
    else:
        start = 0
        whole = visible_keys(first, n_keys, SPAN, STRIDE) // BLOCK_N * BLOCK_N
    return start, whole, stop


@triton.jit
def window_forward(
    q, q_b, q_t, q_h,
    k, k_b, k_n, k_h,
    v, v_b, v_n, v_h,
    out,  # [B, T, Q, D], contiguous
    lse,
    tokens, n_keys, heads, group, head_dim, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens of a query head. `scale` is that of the scores, times log2(e)."""
    batch, head, first = _locate_token_tile(tokens, heads, BLOCK_M)
    t = first + tl.arange(0, BLOCK_M)
    q_tile = load_rows(q + batch * q_b + head * q_h, q_t, t, tokens, head_dim, BLOCK_D)
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    start, whole, stop = _key_range(first, tokens, n_keys, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if WINDOW == 0:
        acc, total, highest = _forward_loop(
            acc, total, highest, q_tile, k, k_n, v, v_n, t, start, whole, n_keys, head_dim, scale,
            False, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    acc, total, highest = _forward_loop(
        acc, total, highest, q_tile, k, k_n, v, v_n, t, whole, stop, n_keys, head_dim, scale,
        True, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    no_key = total == 0.0
    acc = acc / tl.where(no_key, 1.0, total)[:, None]
    out += (batch * tokens * heads + head) * head_dim
    store_rows(out, heads * head_dim, t, tokens, head_dim, acc, BLOCK_D)
    value = tl.where(no_key, float("inf"), highest + tl.log2(tl.where(no_key, 1.0, total)))
    tl.store(lse + (batch * heads + head) * tokens + t, value, mask=t < tokens)


@triton.jit
def _dq_loop(
    acc, q_tile, grad_tile, lse, delta, k, k_n, v, v_n, t, first, last, n_keys, head_dim, scale,
    MASKED: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, k_n, key, n_keys, head_dim, BLOCK_D)
        v_tile = load_rows(v, v_n, key, n_keys, head_dim, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        d_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        weights = tl.exp2(scores * scale - lse[:, None])
        if MASKED:
            visible = _is_visible(t[:, None], key[None, :], n_keys, SPAN, STRIDE, WINDOW)
            weights = tl.where(visible, weights, 0.0)
        d_weights = (weights * (d_weights - delta[:, None])).to(k_tile.dtype)
        acc = tl.dot(d_weights, k_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def window_dq(
    q, q_b, q_t, q_h,
    k, k_b, k_n, k_h,
    v, v_b, v_n, v_h,
    grad, grad_b, grad_t, grad_h,
    dq,  # [B, T, Q, D], contiguous
    lse, delta, gate,
    tokens, n_keys, heads, group, head_dim, scale, natural_scale, ADD: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `window_forward`. With ADD, dq already holds that of another branch."""
    batch, head, first = _locate_token_tile(tokens, heads, BLOCK_M)
    t = first + tl.arange(0, BLOCK_M)
    q_tile = load_rows(q + batch * q_b + head * q_h, q_t, t, tokens, head_dim, BLOCK_D)
    grad_tile = load_rows(grad + batch * grad_b + head * grad_h, grad_t, t, tokens, head_dim, BLOCK_D)
    k += batch * k_b + (head // group) * k_h
    v += batch * v_b + (head // group) * v_h
    row = (batch * heads + head) * tokens + t
    lse_tile = tl.load(lse + row, mask=t < tokens, other=float("inf"))
    delta_tile = tl.load(delta + row, mask=t < tokens, other=0.0)
    start, whole, stop = _key_range(first, tokens, n_keys, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if WINDOW == 0:
        acc = _dq_loop(
            acc, q_tile, grad_tile, lse_tile, delta_tile, k, k_n, v, v_n, t, start, whole, n_keys, head_dim,
            scale, False, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    acc = _dq_loop(
        acc, q_tile, grad_tile, lse_tile, delta_tile, k, k_n, v, v_n, t, whole, stop, n_keys, head_dim, scale,
        True, SPAN, STRIDE, WINDOW, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    factor = tl.load(gate + row, mask=t < tokens, other=0.0) * natural_scale
    acc *= factor[:, None]
    dq += (batch * tokens * heads + head) * head_dim
    if ADD:
        acc += load_rows(dq, heads * head_dim, t, tokens, head_dim, BLOCK_D).to(tl.float32)
    store_rows(dq, heads * head_dim, t, tokens, head_dim, acc, BLOCK_D)


@triton.jit
def _dkdv_loop(
    dk_tile, dv_tile, k_tile, v_tile, q, q_t, grad, grad_t, lse, delta, gate, key, first, last, tokens,
    n_keys, head_dim, scale,
    MASKED: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_M):
        t = start + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q, q_t, t, tokens, head_dim, BLOCK_D)
        grad_tile = load_rows(grad, grad_t, t, tokens, head_dim, BLOCK_D)
        lse_tile = tl.load(lse + t, mask=t < tokens, other=float("inf"))
        delta_tile = tl.load(delta + t, mask=t < tokens, other=0.0)
        gate_tile = tl.load(gate + t, mask=t < tokens, other=0.0)
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [keys, tokens]
        weights = tl.exp2(scores * scale - lse_tile[None, :])
        if MASKED:
            visible = _is_visible(t[None, :], key[:, None], n_keys, SPAN, STRIDE, WINDOW)
            weights = tl.where(visible, weights, 0.0)
        weights *= gate_tile[None, :]
        dv_tile = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv_tile, input_precision=PRECISION)
        d_weights = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        d_weights = (weights * (d_weights - delta_tile[None, :])).to(q_tile.dtype)
        dk_tile = tl.dot(d_weights, q_tile, dk_tile, input_precision=PRECISION)
    return dk_tile, dv_tile


@triton.jit
def window_dkdv(
    q, q_b, q_t, q_h,
    k, k_b, k_n, k_h,
    v, v_b, v_n, v_h,
    grad, grad_b, grad_t, grad_h,
    dk, dv,  # [B, keys, heads / HEADS, D], contiguous
    lse, delta, gate,
    tokens, n_keys, heads, group, head_dim, scale, natural_scale, HEADS: tl.constexpr,
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
    k_tile = load_rows(k + batch * k_b + key_head * k_h, k_n, key, n_keys, head_dim, BLOCK_D)
    v_tile = load_rows(v + batch * v_b + key_head * v_h, v_n, key, n_keys, head_dim, BLOCK_D)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    # Tokens from `start` on attend to the first key of the tile; from `whole` to `stop` to all of them.
    last_key = tl.minimum(first_key + BLOCK_N, n_keys) - 1
    start = (first_key * STRIDE + SPAN - 1) // BLOCK_M * BLOCK_M
    if WINDOW > 0:
        stop = tl.minimum(tokens, last_key + WINDOW)
        whole = stop
    else:
        stop = tokens
        whole = tl.cdiv(last_key * STRIDE + SPAN - 1, BLOCK_M) * BLOCK_M
        if last_key + 1 < first_key + BLOCK_N:
            whole = stop  # a ragged tile is masked everywhere
        whole = tl.minimum(whole, stop)
    for number in range(HEADS):
        head = part * HEADS + number
        q_head = q + batch * q_b + head * q_h
        grad_head = grad + batch * grad_b + head * grad_h
        row = (batch * heads + head) * tokens
        dk_tile, dv_tile = _dkdv_loop(
            dk_tile, dv_tile, k_tile, v_tile, q_head, q_t, grad_head, grad_t, lse + row, delta + row,
            gate + row, key, start, whole, tokens, n_keys, head_dim, scale,
            True, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_D, PRECISION,
        )  # fmt: skip
        if WINDOW == 0:
            dk_tile, dv_tile = _dkdv_loop(
                dk_tile, dv_tile, k_tile, v_tile, q_head, q_t, grad_head, grad_t, lse + row, delta + row,
                gate + row, key, whole, stop, tokens, n_keys, head_dim, scale,
                False, SPAN, STRIDE, WINDOW, BLOCK_M, BLOCK_D, PRECISION,
            )  # fmt: skip
    address = (batch * n_keys * outs + part) * head_dim
    store_rows(dk + address, outs * head_dim, key, n_keys, head_dim, dk_tile * natural_scale, BLOCK_D)
    store_rows(dv + address, outs * head_dim, key, n_keys, head_dim, dv_tile, BLOCK_D)
