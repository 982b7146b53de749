# mypy: allow-untyped-defs, allow-incomplete-defs
"""Triton kernels of native sparse attention: compressed and sliding-window branch, then the selection."""

import triton
import triton.language as tl

# Compressed and sliding-window branch ----------------------------------------------------------------
#
# Flash attention over a band of keys.
#
# Key j stands for the tokens j * STRIDE .. j * STRIDE + SPAN - 1. Token t attends to it if the last of them
# is not after t and (WINDOW > 0) if t - j < WINDOW. Compressed keys have no window; for the sliding window
# a key is a token (STRIDE = SPAN = 1). The keys of a tile of tokens form one range, masked at both its
# ends.
#
# Scores are in base 2, because exp2 is one instruction. The log-sum-exp of a token without keys is +inf,
# which makes its weights exp2(score - inf) = 0 in backward. Per-row tensors are [B, query heads, T] in
# fp32.
#
# The gate is outside the softmax: the gradient of a score is gate * weight * (grad . v - delta), and
# delta = grad . out is also the gradient of the gate.


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


# Selection branch ------------------------------------------------------------------------------------
#
# Which blocks each token selects, and attention to them.
#
# 1. block_importance, select_blocks: the compressed attention's log-sum-exp is known, so every weight is
#    final when it is computed, and is added to its block's importance at once.
# 2. rank_pairs, list_pairs: the (token, slot) pairs that selected each block. A pair is token * SLOTS + slot.
# 3. selected_*: attention, block by block. Rows of a tile are (pair, head of the group), GROUP (a power of
#    two) per pair: products are tall enough for tensor cores at every group size, and a block of keys and
#    values is read once for many tokens. What a pair contributes to its token goes to its own slot in
#    `parts`, which a second kernel sums: no atomics, bitwise reproducible.
#
# A work item is a block and a range of its pairs; `work_block` is -1 where there is none. Scores are in
# base 2. Per-row tensors are [B, T, query heads] in fp32.


@triton.jit
def _load_rows(base, offset, inside, head_dim, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D], the rows `inside` from base + offset; zeros elsewhere."""
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < head_dim)[None, :]
    return tl.load(base + offset[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(base, offset, inside, head_dim, values, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < head_dim)[None, :]
    tl.store(base + offset[:, None] + columns[None, :], values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _importance_loop(
    q_tile, lse, t, ck, ck_n, out_row, real, first, last, n_keys, blocks, head_dim, scale,
    MASKED: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, SPAN_STRIDES: tl.constexpr,
    BLOCK_STRIDES: tl.constexpr, PADDED_STRIDES: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Importances of blocks first .. last - 1. Without MASKED all their compressed blocks are visible."""
    for start in range(first, last, BLOCKS):
        # The BLOCK_STRIDES compressed blocks that begin in each block; the last ones reach beyond it.
        column = tl.arange(0, BLOCKS * PADDED_STRIDES)
        stride_index = column % PADDED_STRIDES
        key = (start + column // PADDED_STRIDES) * BLOCK_STRIDES + stride_index
        is_key = (stride_index < BLOCK_STRIDES) & (key < n_keys)
        k_tile = _load_rows(ck, key.to(tl.int64) * ck_n, is_key, head_dim, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        shared = tl.minimum(SPAN_STRIDES, BLOCK_STRIDES - stride_index).to(tl.float32)
        weights = tl.exp2(scores * scale - lse[:, None]) * shared[None, :]
        if MASKED:
            visible = (key * STRIDE + SPAN - 1)[None, :] <= t[:, None]
            weights = tl.where(visible & is_key[None, :], weights, 0.0)
        elif BLOCK_STRIDES < PADDED_STRIDES:
            weights = tl.where((stride_index < BLOCK_STRIDES)[None, :], weights, 0.0)
        total = tl.sum(tl.reshape(weights, (TOKENS * GROUP, BLOCKS, PADDED_STRIDES)), 2)
        # Those that begin before a block and reach into it.
        block = start + tl.arange(0, BLOCKS)
        for before in tl.static_range(1, SPAN_STRIDES):
            earlier = block * BLOCK_STRIDES - before
            exists = (earlier >= 0) & (earlier < n_keys)
            k_before = _load_rows(ck, earlier.to(tl.int64) * ck_n, exists, head_dim, BLOCK_D)
            scores = tl.dot(q_tile, tl.trans(k_before), input_precision=PRECISION)
            visible = exists[None, :] & ((earlier * STRIDE + SPAN - 1)[None, :] <= t[:, None])
            weights = tl.exp2(scores * scale - lse[:, None]) * min(SPAN_STRIDES - before, BLOCK_STRIDES)
            total += tl.where(visible, weights, 0.0)
        total = tl.sum(tl.reshape(total, (TOKENS, GROUP, BLOCKS)), 1)
        offset = out_row[:, None] + block[None, :]
        tl.store(offset, total, mask=real[:, None] & (block < blocks)[None, :])


@triton.jit
def block_importance(
    q, q_b, q_t, q_h,
    ck, ck_b, ck_n, ck_h,
    lse,  # [B, Q, T], of the compressed attention
    out,  # [B, H, segment, blocks] fp32
    from_token, to_token, tokens, n_keys, heads, group, blocks, head_dim, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, SPAN_STRIDES: tl.constexpr, BLOCK_STRIDES: tl.constexpr,
    PADDED_STRIDES: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per TOKENS tokens of a key/value head; all blocks that begin before the last of them."""
    key_heads = heads // group
    segment = to_token - from_token
    tiles = tl.cdiv(segment, TOKENS)
    per_tile = tl.num_programs(0) // tiles
    z = tl.program_id(0) % per_tile
    batch, key_head = (z // key_heads).to(tl.int64), (z % key_heads).to(tl.int64)
    # The last tokens, which have the most keys, come first.
    first = from_token + (tiles - 1 - tl.program_id(0) // per_tile) * TOKENS
    row = tl.arange(0, TOKENS * GROUP)
    t, member = first + row // GROUP, row % GROUP
    inside = (t < to_token) & (member < group)
    head = key_head * group + member
    columns = tl.arange(0, BLOCK_D)
    q_tile = tl.load(
        q + batch * q_b + t.to(tl.int64)[:, None] * q_t + head[:, None] * q_h + columns[None, :],
        mask=inside[:, None] & (columns < head_dim)[None, :],
        other=0.0,
    )
    lse_tile = tl.load(lse + (batch * heads + head) * tokens + t, mask=inside, other=float("inf"))
    ck += batch * ck_b + key_head * ck_h
    token = first + tl.arange(0, TOKENS)
    out_row = out + (z.to(tl.int64) * segment + (token - from_token)) * blocks
    real = token < to_token
    last_t = tl.minimum(first + TOKENS, to_token) - 1
    stop = tl.minimum(last_t // (BLOCK_STRIDES * STRIDE) + 1, blocks)
    # Blocks before `whole`: the first token attends to all their compressed blocks.
    whole = tl.maximum(first + 1 - SPAN, 0) // (BLOCK_STRIDES * STRIDE)
    whole = tl.minimum(whole, n_keys // BLOCK_STRIDES) // BLOCKS * BLOCKS
    _importance_loop(
        q_tile, lse_tile, t, ck, ck_n, out_row, real, 0, whole, n_keys, blocks, head_dim, scale, False,
        SPAN, STRIDE, SPAN_STRIDES, BLOCK_STRIDES, PADDED_STRIDES, TOKENS, GROUP, BLOCKS, BLOCK_D, PRECISION,
    )  # fmt: skip
    _importance_loop(
        q_tile, lse_tile, t, ck, ck_n, out_row, real, whole, stop, n_keys, blocks, head_dim, scale, True,
        SPAN, STRIDE, SPAN_STRIDES, BLOCK_STRIDES, PADDED_STRIDES, TOKENS, GROUP, BLOCKS, BLOCK_D, PRECISION,
    )  # fmt: skip


@triton.jit
def select_blocks(
    scores,  # [B, H, segment, blocks] fp32
    chosen,  # [B, T, H, SLOTS] int32
    from_token, to_token, tokens, key_heads, blocks,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    ONE_LOAD: tl.constexpr,
):  # fmt: skip
    """Slot 0: block 0; slot 1: the token's block; slot 2: the one before; then by importance. -1: none.

    Each slot takes the largest of what is left, the lower index where equal. Rows up to WIDTH are read once;
    of longer ones every slot reads all, and takes the largest that comes after the slot before it in the
    order (decreasing importance, increasing index).
    """
    segment = to_token - from_token
    tiles = tl.cdiv(segment, TOKENS)
    z = (tl.program_id(0) // tiles).to(tl.int64)
    batch, key_head = z // key_heads, z % key_heads
    token = from_token + tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    inside = token < to_token
    own = token // BLOCK
    row = scores + (z * segment + (token - from_token)) * blocks
    out = chosen + ((batch * tokens + token) * key_heads + key_head) * SLOTS
    tl.store(out, tl.zeros_like(own), mask=inside)
    tl.store(out + 1, tl.where(own > 0, own, -1), mask=inside)
    tl.store(out + 2, tl.where(own > 1, own - 1, -1), mask=inside)
    # Block 0 and the two latest are taken already.
    end = tl.where(inside, own - 1, 0)
    column = tl.arange(0, WIDTH)
    if ONE_LOAD:
        values = _load_importance(row, column, end)
        for slot in range(3, SLOTS):
            largest = tl.max(values, 1)
            index = tl.min(tl.where(values == largest[:, None], column[None, :], WIDTH), 1)
            tl.store(out + slot, tl.where(largest >= 0.0, index, -1), mask=inside)
            values = tl.where(column[None, :] == index[:, None], -1.0, values)
    else:
        last_value = tl.full((TOKENS,), float("inf"), tl.float32)
        last_index = tl.full((TOKENS,), -1, tl.int32)
        for slot in range(3, SLOTS):
            best_value = tl.full((TOKENS,), -1.0, tl.float32)
            best_index = tl.full((TOKENS,), -1, tl.int32)
            for start in range(0, tl.max(end), WIDTH):
                index = start + column
                values = _load_importance(row, index, end)
                later = (values == last_value[:, None]) & (index[None, :] > last_index[:, None])
                values = tl.where(later | (values < last_value[:, None]), values, -1.0)
                largest = tl.max(values, 1)
                found = tl.min(tl.where(values == largest[:, None], index[None, :], 2147483647), 1)
                better = largest > best_value
                best_value = tl.where(better, largest, best_value)
                best_index = tl.where(better, found, best_index)
            tl.store(out + slot, best_index, mask=inside)
            last_value, last_index = best_value, best_index


@triton.jit
def _load_importance(row, index, end):
    """Importances of the blocks from 1 to before `end`; -1 elsewhere, and for NaN."""
    free = (index >= 1)[None, :] & (index[None, :] < end[:, None])
    values = tl.load(row[:, None] + index[None, :], mask=free, other=-1.0)
    return tl.where(values >= 0.0, values, -1.0)


@triton.jit
def rank_pairs(
    chosen,  # [B, T, H, SLOTS] int32, -1: none
    counts,  # [B, H, blocks, tiles] int32, zeros
    rank,  # as `chosen`: the rank of each pair among those of its block and tile of tokens
    tokens, key_heads, blocks, tiles, tile_size,
    SLOTS: tl.constexpr, SLOTS_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per tile of tokens of a key/value head. Ranks follow the order of the tokens.

    With atomic counters, ranks would follow the order of arrival: gradients of the keys would be summed in
    another order, and differ in their last bits, from run to run.
    """
    z, number = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    batch, key_head = z // key_heads, z % key_heads
    last = tl.minimum((number + 1) * tile_size, tokens)
    counter = counts + z * blocks * tiles + number
    flat = tl.arange(0, TOKENS * SLOTS_PADDED)
    slot = flat % SLOTS_PADDED
    for start in range(number * tile_size, last, TOKENS):
        t = start + flat // SLOTS_PADDED
        offset = ((batch * tokens + t) * key_heads + key_head) * SLOTS + slot
        block = tl.load(chosen + offset, mask=(t < last) & (slot < SLOTS), other=-1)
        taken = block >= 0
        same = block[:, None] == block[None, :]
        before = tl.sum((same & (flat[None, :] < flat[:, None])).to(tl.int32), 1)
        after = tl.sum((same & (flat[None, :] > flat[:, None])).to(tl.int32), 1)
        # Bypass the L1 cache: another thread of the program wrote the counter.
        position = tl.load(counter + block * tiles, mask=taken, other=0, cache_modifier=".cg") + before
        tl.store(rank + offset, position, mask=taken)
        tl.debug_barrier()
        tl.store(counter + block * tiles, position + 1, mask=taken & (after == 0))
        tl.debug_barrier()


@triton.jit
def list_pairs(
    chosen, rank,
    starts,  # [B, H, blocks * tiles + 1] int32
    pairs,  # [B, H, T * SLOTS] int32
    tokens, key_heads, blocks, tiles, tile_size,
    SLOTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    per_batch = tl.cdiv(tokens * key_heads * SLOTS, SIZE)
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    at = (tl.program_id(0) % per_batch).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < tokens * key_heads * SLOTS
    offset = batch * tokens * key_heads * SLOTS + at
    block = tl.load(chosen + offset, mask=inside, other=-1)
    token, key_head = at // (key_heads * SLOTS), at // SLOTS % key_heads
    taken = inside & (block >= 0)
    z = batch * key_heads + key_head
    start = tl.load(
        starts + z * (blocks * tiles + 1) + block * tiles + token // tile_size, mask=taken, other=0
    )
    number = tl.load(rank + offset, mask=taken, other=0)
    pair = token * SLOTS + at % SLOTS
    tl.store(pairs + z * tokens * SLOTS + start + number, pair.to(tl.int32), mask=taken)


@triton.jit
def _block_keys(block, tokens, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """BLOCK_N tokens from the start of the block, and which of them are in it."""
    within = tl.arange(0, BLOCK_N)
    key = block * BLOCK + within
    return key, (within < BLOCK) & (key < tokens)


@triton.jit
def _load_pairs(start, last, pairs, group, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The pair of each row of a tile, from index `start` of the list on, and which rows have one."""
    row = tl.arange(0, ROWS)
    number = start + row // GROUP
    inside = (number < last) & (row % GROUP < group)
    pair = tl.load(pairs + number, mask=inside, other=0).to(tl.int64)
    return pair, inside


@triton.jit
def _load_row_values(lse, delta, gate, row, inside):
    lse_tile = tl.load(lse + row, mask=inside, other=float("inf"))
    delta_tile = tl.load(delta + row, mask=inside, other=0.0)
    return lse_tile, delta_tile, tl.load(gate + row, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _locate_rows(from_token, to_token, heads, ROWS: tl.constexpr):
    """(batch, token of the segment, head, whether it exists) of each row of a program that sums parts."""
    segment = to_token - from_token
    per_batch = tl.cdiv(segment * heads, ROWS)
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    row = tl.program_id(0) % per_batch * ROWS + tl.arange(0, ROWS)
    return batch, row // heads, row % heads, row // heads < segment


@triton.jit
def selected_forward(
    q, q_b, q_t, q_h,
    k, k_b, k_t, k_h,
    v, v_b, v_t, v_h,
    parts,  # [B, segment, SLOTS, Q, D]
    parts_lse,  # [B, segment, SLOTS, Q] fp32
    pairs, work_block, work_first, work_last,  # of this segment: [B, H, work]
    from_token, to_token, tokens, heads, group, head_dim, scale, work,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax of each pair over its own block."""
    z = (tl.program_id(0) // work).to(tl.int64)
    item = tl.program_id(0)
    block = tl.load(work_block + item)
    if block >= 0:
        first, last = tl.load(work_first + item), tl.load(work_last + item)
        key_heads = heads // group
        batch, key_head = z // key_heads, z % key_heads
        key, real = _block_keys(block, tokens, BLOCK, BLOCK_N)
        wide_key = key.to(tl.int64)
        k_tile = _load_rows(k + batch * k_b + key_head * k_h, wide_key * k_t, real, head_dim, BLOCK_D)
        v_tile = _load_rows(v + batch * v_b + key_head * v_h, wide_key * v_t, real, head_dim, BLOCK_D)
        q += batch * q_b
        pairs += z * tokens * SLOTS
        head = key_head * group + tl.arange(0, ROWS) % GROUP
        for start in range(first, last, ROWS // GROUP):
            pair, inside = _load_pairs(start, last, pairs, group, GROUP, ROWS)
            t = pair // SLOTS
            q_tile = _load_rows(q, t * q_t + head * q_h, inside, head_dim, BLOCK_D)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            visible = (key[None, :] <= t[:, None]) & real[None, :]
            scores = tl.where(visible, scores, float("-inf"))
            highest = tl.max(scores, 1) * scale
            # Padding rows have no keys: -inf - -inf would be NaN.
            highest = tl.where(inside, highest, 0.0)
            weights = tl.exp2(scores * scale - highest[:, None])
            total = tl.sum(weights, 1)
            total = tl.where(inside, total, 1.0)
            result = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION) / total[:, None]
            offset = ((batch * (to_token - from_token) - from_token) * SLOTS + pair) * heads + head
            _store_rows(parts, offset * head_dim, inside, head_dim, result, BLOCK_D)
            tl.store(parts_lse + offset, highest + tl.log2(total), mask=inside)


@triton.jit
def combine_branches(
    parts, parts_lse, chosen,
    compressed, windowed,  # [B, T, Q, D]: the results of the other branches
    gate_cmp, gate_slc, gate_win,  # [B, T, Q]
    selected, out,  # [B, T, Q, D]
    lse,
    from_token, to_token, tokens, heads, group, head_dim,
    SLOTS: tl.constexpr, SLOTS_PADDED: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """ROWS rows (token, head): sum the parts of the selected branch, then the gated branches."""
    batch, token, head, real = _locate_rows(from_token, to_token, heads, ROWS)
    offset = (batch * (to_token - from_token) + token) * SLOTS
    token = batch * tokens + from_token + token
    slots = chosen + (token * (heads // group) + head // group) * SLOTS
    slot = tl.arange(0, SLOTS_PADDED)
    taken = (slot < SLOTS)[None, :] & real[:, None]
    taken &= tl.load(slots[:, None] + slot[None, :], mask=taken, other=-1) >= 0
    lse_at = parts_lse + (offset[:, None] + slot[None, :]) * heads + head[:, None]
    lse_of = tl.load(lse_at, mask=taken, other=float("-inf"))
    highest = tl.max(lse_of, 1)
    highest = tl.where(real, highest, 0.0)
    total = tl.where(real, tl.sum(tl.exp2(lse_of - highest[:, None]), 1), 1.0)
    value = highest + tl.log2(total)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for number in range(SLOTS):
        exists = real & (tl.load(slots + number, mask=real, other=-1) >= 0)
        part_lse = tl.load(parts_lse + (offset + number) * heads + head, mask=exists, other=float("-inf"))
        part = _load_rows(parts, ((offset + number) * heads + head) * head_dim, exists, head_dim, BLOCK_D)
        acc += tl.exp2(part_lse - value)[:, None] * part.to(tl.float32)
    row = token * heads + head
    tl.store(lse + row, value, mask=real)
    acc = acc.to(out.dtype.element_ty)
    if KEEP:
        _store_rows(selected, row * head_dim, real, head_dim, acc, BLOCK_D)
    result = tl.load(gate_slc + row, mask=real, other=0.0).to(tl.float32)[:, None] * acc.to(tl.float32)
    other = _load_rows(compressed, row * head_dim, real, head_dim, BLOCK_D).to(tl.float32)
    result += tl.load(gate_cmp + row, mask=real, other=0.0).to(tl.float32)[:, None] * other
    other = _load_rows(windowed, row * head_dim, real, head_dim, BLOCK_D).to(tl.float32)
    result += tl.load(gate_win + row, mask=real, other=0.0).to(tl.float32)[:, None] * other
    _store_rows(out, row * head_dim, real, head_dim, result, BLOCK_D)


@triton.jit
def selected_dq(
    q, q_b, q_t, q_h,
    k, k_b, k_t, k_h,
    v, v_b, v_t, v_h,
    grad, grad_b, grad_t, grad_h,
    parts,
    lse, delta, gate,
    pairs, work_block, work_first, work_last,
    from_token, to_token, tokens, heads, group, head_dim, scale, natural_scale, work,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each pair's part of dq."""
    z = (tl.program_id(0) // work).to(tl.int64)
    item = tl.program_id(0)
    block = tl.load(work_block + item)
    if block >= 0:
        first, last = tl.load(work_first + item), tl.load(work_last + item)
        key_heads = heads // group
        batch, key_head = z // key_heads, z % key_heads
        key, real = _block_keys(block, tokens, BLOCK, BLOCK_N)
        wide_key = key.to(tl.int64)
        k_tile = _load_rows(k + batch * k_b + key_head * k_h, wide_key * k_t, real, head_dim, BLOCK_D)
        v_tile = _load_rows(v + batch * v_b + key_head * v_h, wide_key * v_t, real, head_dim, BLOCK_D)
        q += batch * q_b
        grad += batch * grad_b
        pairs += z * tokens * SLOTS
        head = key_head * group + tl.arange(0, ROWS) % GROUP
        for start in range(first, last, ROWS // GROUP):
            pair, inside = _load_pairs(start, last, pairs, group, GROUP, ROWS)
            t = pair // SLOTS
            q_tile = _load_rows(q, t * q_t + head * q_h, inside, head_dim, BLOCK_D)
            grad_tile = _load_rows(grad, t * grad_t + head * grad_h, inside, head_dim, BLOCK_D)
            row = (batch * tokens + t) * heads + head
            lse_tile, delta_tile, gate_tile = _load_row_values(lse, delta, gate, row, inside)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            d_weights = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            visible = (key[None, :] <= t[:, None]) & real[None, :]
            weights = tl.where(visible, tl.exp2(scores * scale - lse_tile[:, None]), 0.0)
            d_weights = (weights * (d_weights - delta_tile[:, None])).to(k_tile.dtype)
            result = tl.dot(d_weights, k_tile, input_precision=PRECISION)
            result *= (gate_tile * natural_scale)[:, None]
            offset = ((batch * (to_token - from_token) - from_token) * SLOTS + pair) * heads + head
            _store_rows(parts, offset * head_dim, inside, head_dim, result, BLOCK_D)


@triton.jit
def add_selected_dq(
    parts, chosen, dq,
    from_token, to_token, tokens, heads, group, head_dim,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq, which holds the other branches', plus the parts of the row's pairs."""
    batch, token, head, real = _locate_rows(from_token, to_token, heads, ROWS)
    offset = (batch * (to_token - from_token) + token) * SLOTS
    token = batch * tokens + from_token + token
    slots = chosen + (token * (heads // group) + head // group) * SLOTS
    at = (token * heads + head) * head_dim
    acc = _load_rows(dq, at, real, head_dim, BLOCK_D).to(tl.float32)
    for number in range(SLOTS):
        exists = real & (tl.load(slots + number, mask=real, other=-1) >= 0)
        part = _load_rows(parts, ((offset + number) * heads + head) * head_dim, exists, head_dim, BLOCK_D)
        acc += part.to(tl.float32)
    _store_rows(dq, at, real, head_dim, acc, BLOCK_D)


@triton.jit
def selected_dkdv(
    q, q_b, q_t, q_h,
    k, k_b, k_t, k_h,
    v, v_b, v_t, v_h,
    grad, grad_b, grad_t, grad_h,
    dk, dv,  # [B, T, H, D], contiguous, holding those of the window
    partial,  # [B, H, work items beyond the first of their blocks, 2, BLOCK_N, D] fp32
    lse, delta, gate,
    pairs, work_block, work_first, work_last,
    tokens, heads, group, blocks, head_dim, scale, natural_scale, work, partial_items,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's dk and dv from a range of its pairs: the first adds to dk and dv, others go to `partial`."""
    z, number = (tl.program_id(0) // work).to(tl.int64), tl.program_id(0) % work
    item = tl.program_id(0)
    block = tl.load(work_block + item)
    if block >= 0:
        first, last = tl.load(work_first + item), tl.load(work_last + item)
        is_first = number == 0
        if number > 0:
            is_first = tl.load(work_block + item - 1) != block
        key_heads = heads // group
        batch, key_head = z // key_heads, z % key_heads
        key, real = _block_keys(block, tokens, BLOCK, BLOCK_N)
        wide_key = key.to(tl.int64)
        k_tile = _load_rows(k + batch * k_b + key_head * k_h, wide_key * k_t, real, head_dim, BLOCK_D)
        v_tile = _load_rows(v + batch * v_b + key_head * v_h, wide_key * v_t, real, head_dim, BLOCK_D)
        q += batch * q_b
        grad += batch * grad_b
        pairs += z * tokens * SLOTS
        head = key_head * group + tl.arange(0, ROWS) % GROUP
        dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(first, last, ROWS // GROUP):
            pair, inside = _load_pairs(start, last, pairs, group, GROUP, ROWS)
            t = pair // SLOTS
            q_tile = _load_rows(q, t * q_t + head * q_h, inside, head_dim, BLOCK_D)
            grad_tile = _load_rows(grad, t * grad_t + head * grad_h, inside, head_dim, BLOCK_D)
            row = (batch * tokens + t) * heads + head
            lse_tile, delta_tile, gate_tile = _load_row_values(lse, delta, gate, row, inside)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [keys, rows]
            visible = (key[:, None] <= t[None, :]) & real[:, None]
            weights = tl.where(visible, tl.exp2(scores * scale - lse_tile[None, :]), 0.0) * gate_tile[None, :]
            dv_tile = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv_tile, input_precision=PRECISION)
            d_weights = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
            d_weights = (weights * (d_weights - delta_tile[None, :])).to(q_tile.dtype)
            dk_tile = tl.dot(d_weights, q_tile, dk_tile, input_precision=PRECISION)
        dk_tile *= natural_scale
        if is_first:
            at = ((batch * tokens + key) * key_heads + key_head) * head_dim
            dk_tile += _load_rows(dk, at, real, head_dim, BLOCK_D).to(tl.float32)
            dv_tile += _load_rows(dv, at, real, head_dim, BLOCK_D).to(tl.float32)
            _store_rows(dk, at, real, head_dim, dk_tile, BLOCK_D)
            _store_rows(dv, at, real, head_dim, dv_tile, BLOCK_D)
        else:
            # Every block has a first work item: this is item number - (block + 1) of the others.
            within = tl.arange(0, BLOCK_N)
            at = (z * partial_items + number - block - 1) * 2 * BLOCK_N * head_dim + within * head_dim
            _store_rows(partial, at, within < BLOCK_N, head_dim, dk_tile, BLOCK_D)
            _store_rows(partial, at + BLOCK_N * head_dim, within < BLOCK_N, head_dim, dv_tile, BLOCK_D)


@triton.jit
def add_partial_dkdv(
    partial, dk, dv,
    work_start,  # [B, H, blocks + 1] int32: the first work item of each block
    tokens, key_heads, blocks, head_dim, partial_items,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv plus the partial sums of the block's other work items."""
    z, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    first = tl.load(work_start + z * (blocks + 1) + block)
    last = tl.load(work_start + z * (blocks + 1) + block + 1)
    if last > first + 1:
        batch, key_head = z // key_heads, z % key_heads
        key, real = _block_keys(block, tokens, BLOCK, BLOCK_N)
        at = ((batch * tokens + key) * key_heads + key_head) * head_dim
        dk_tile = _load_rows(dk, at, real, head_dim, BLOCK_D).to(tl.float32)
        dv_tile = _load_rows(dv, at, real, head_dim, BLOCK_D).to(tl.float32)
        start = z * partial_items * 2 * BLOCK_N * head_dim + tl.arange(0, BLOCK_N) * head_dim
        for number in range(first + 1, last):
            offset = start + (number - block - 1).to(tl.int64) * 2 * BLOCK_N * head_dim
            dk_tile += _load_rows(partial, offset, real, head_dim, BLOCK_D)
            dv_tile += _load_rows(partial, offset + BLOCK_N * head_dim, real, head_dim, BLOCK_D)
        _store_rows(dk, at, real, head_dim, dk_tile, BLOCK_D)
        _store_rows(dv, at, real, head_dim, dv_tile, BLOCK_D)


@triton.jit
def branch_deltas(
    grad, grad_b, grad_t, grad_h,
    compressed, selected, windowed,  # [B, T, Q, D]
    delta_cmp, delta_win,  # [B, Q, T] fp32
    delta_slc,  # [B, T, Q] fp32
    tokens, heads, head_dim,
    TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """grad . out of each branch: the gradient of its gate, and the delta of its softmax's gradient."""
    tiles = tl.cdiv(tokens, TOKENS)
    z = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = z // heads, z % heads
    t = (tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    real = t < tokens
    row = (batch * tokens + t) * heads + head
    grad += batch * grad_b + head * grad_h
    g_tile = _load_rows(grad, t * grad_t, real, head_dim, BLOCK_D).to(tl.float32)
    value = tl.sum(g_tile * _load_rows(compressed, row * head_dim, real, head_dim, BLOCK_D).to(tl.float32), 1)
    tl.store(delta_cmp + z * tokens + t, value, mask=real)
    value = tl.sum(g_tile * _load_rows(windowed, row * head_dim, real, head_dim, BLOCK_D).to(tl.float32), 1)
    tl.store(delta_win + z * tokens + t, value, mask=real)
    value = tl.sum(g_tile * _load_rows(selected, row * head_dim, real, head_dim, BLOCK_D).to(tl.float32), 1)
    tl.store(delta_slc + row, value, mask=real)
