"""Attention over selected blocks, block by block: each meets the (token, slot) pairs that selected it.

A pair is token * SLOTS + slot. Rows of a tile are (pair, head of the group), GROUP (a power of two) per pair,
so that a product is tall enough for the tensor cores at every group size, and a block of keys and values is
read once for many tokens. What a pair gives to its token (a part of the result, or of dq) goes to a place of
its own in `parts`, which a second kernel adds up: no atomics, the same bits every time.

A piece of work is a block and a range of pairs of its list; `work_block` is -1 where there is none. Scores
are in units of log 2. Per-row numbers are [B, T, Q] fp32.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(base, place, inside, width, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D], the rows `inside` from base + place; zeros elsewhere."""
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < width)[None, :]
    return tl.load(base + place[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(base, place, inside, width, values, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < width)[None, :]
    tl.store(base + place[:, None] + columns[None, :], values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _keys_of_block(block, tokens, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """BLOCK_N tokens from the first of the block, and which of them are in it."""
    within = tl.arange(0, BLOCK_N)
    key = block * BLOCK + within
    return key, (within < BLOCK) & (key < tokens)


@triton.jit
def _pairs_from(start, last, pairs, group, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The pair of each row of a tile, from number `start` of the list on, and which rows have one."""
    row = tl.arange(0, ROWS)
    number = start + row // GROUP
    inside = (number < last) & (row % GROUP < group)
    pair = tl.load(pairs + number, mask=inside, other=0).to(tl.int64)
    return pair, inside


@triton.jit
def _numbers_of_rows(lse, delta, gate, row, inside):
    lse_tile = tl.load(lse + row, mask=inside, other=float("inf"))
    delta_tile = tl.load(delta + row, mask=inside, other=0.0)
    return lse_tile, delta_tile, tl.load(gate + row, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _tokens_and_heads(from_token, to_token, heads, ROWS: tl.constexpr):
    """(batch, token of the segment, head, whether there is one) of the rows of a program that adds parts."""
    segment = to_token - from_token
    per_batch = tl.cdiv(segment * heads, ROWS)
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    row = tl.program_id(0) % per_batch * ROWS + tl.arange(0, ROWS)
    return batch, row // heads, row % heads, row // heads < segment


@triton.jit
def pair_forward(
    q, q_b, q_t, q_h,
    k, k_b, k_t, k_h,
    v, v_b, v_t, v_h,
    parts,  # [B, segment, SLOTS, Q, D]
    parts_lse,  # [B, segment, SLOTS, Q] fp32
    pairs, work_block, work_first, work_last,  # of this segment: [B, H, work]
    from_token, to_token, tokens, heads, group, width, scale, work,
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
        key, real = _keys_of_block(block, tokens, BLOCK, BLOCK_N)
        wide_key = key.to(tl.int64)
        k_tile = _rows(k + batch * k_b + key_head * k_h, wide_key * k_t, real, width, BLOCK_D)
        v_tile = _rows(v + batch * v_b + key_head * v_h, wide_key * v_t, real, width, BLOCK_D)
        q += batch * q_b
        pairs += z * tokens * SLOTS
        head = key_head * group + tl.arange(0, ROWS) % GROUP
        for start in range(first, last, ROWS // GROUP):
            pair, inside = _pairs_from(start, last, pairs, group, GROUP, ROWS)
            t = pair // SLOTS
            q_tile = _rows(q, t * q_t + head * q_h, inside, width, BLOCK_D)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            seen = (key[None, :] <= t[:, None]) & real[None, :]
            scores = tl.where(seen, scores, float("-inf"))
            highest = tl.max(scores, 1) * scale
            # Rows that are none may see nothing: -inf - -inf would be NaN.
            highest = tl.where(inside, highest, 0.0)
            weights = tl.exp2(scores * scale - highest[:, None])
            total = tl.sum(weights, 1)
            total = tl.where(inside, total, 1.0)
            result = tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION) / total[:, None]
            place = ((batch * (to_token - from_token) - from_token) * SLOTS + pair) * heads + head
            _store_rows(parts, place * width, inside, width, result, BLOCK_D)
            tl.store(parts_lse + place, highest + tl.log2(total), mask=inside)


@triton.jit
def combine(
    parts, parts_lse, chosen,
    compressed, nearby,  # [B, T, Q, D]: the results of the other branches
    gate_cmp, gate_slc, gate_win,  # [B, T, Q]
    selected, out,  # [B, T, Q, D]
    lse,
    from_token, to_token, tokens, heads, group, width,
    SLOTS: tl.constexpr, SLOTS_PADDED: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """ROWS rows (token, head): their parts become the selection's result, then the gated sum of all."""
    batch, token, head, real = _tokens_and_heads(from_token, to_token, heads, ROWS)
    place = (batch * (to_token - from_token) + token) * SLOTS
    token = batch * tokens + from_token + token
    slots_at = chosen + (token * (heads // group) + head // group) * SLOTS
    slot = tl.arange(0, SLOTS_PADDED)
    taken = (slot < SLOTS)[None, :] & real[:, None]
    taken &= tl.load(slots_at[:, None] + slot[None, :], mask=taken, other=-1) >= 0
    lse_at = parts_lse + (place[:, None] + slot[None, :]) * heads + head[:, None]
    lse_of = tl.load(lse_at, mask=taken, other=float("-inf"))
    highest = tl.max(lse_of, 1)
    highest = tl.where(real, highest, 0.0)
    total = tl.where(real, tl.sum(tl.exp2(lse_of - highest[:, None]), 1), 1.0)
    value = highest + tl.log2(total)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for number in range(SLOTS):
        there = real & (tl.load(slots_at + number, mask=real, other=-1) >= 0)
        part_lse = tl.load(parts_lse + (place + number) * heads + head, mask=there, other=float("-inf"))
        part = _rows(parts, ((place + number) * heads + head) * width, there, width, BLOCK_D)
        acc += tl.exp2(part_lse - value)[:, None] * part.to(tl.float32)
    row = token * heads + head
    tl.store(lse + row, value, mask=real)
    acc = acc.to(out.dtype.element_ty)
    if KEEP:
        _store_rows(selected, row * width, real, width, acc, BLOCK_D)
    result = tl.load(gate_slc + row, mask=real, other=0.0).to(tl.float32)[:, None] * acc.to(tl.float32)
    other = _rows(compressed, row * width, real, width, BLOCK_D).to(tl.float32)
    result += tl.load(gate_cmp + row, mask=real, other=0.0).to(tl.float32)[:, None] * other
    other = _rows(nearby, row * width, real, width, BLOCK_D).to(tl.float32)
    result += tl.load(gate_win + row, mask=real, other=0.0).to(tl.float32)[:, None] * other
    _store_rows(out, row * width, real, width, result, BLOCK_D)


@triton.jit
def pair_query_gradient(
    q, q_b, q_t, q_h,
    k, k_b, k_t, k_h,
    v, v_b, v_t, v_h,
    grad, grad_b, grad_t, grad_h,
    parts,
    lse, delta, gate,
    pairs, work_block, work_first, work_last,
    from_token, to_token, tokens, heads, group, width, scale, natural_scale, work,
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
        key, real = _keys_of_block(block, tokens, BLOCK, BLOCK_N)
        wide_key = key.to(tl.int64)
        k_tile = _rows(k + batch * k_b + key_head * k_h, wide_key * k_t, real, width, BLOCK_D)
        v_tile = _rows(v + batch * v_b + key_head * v_h, wide_key * v_t, real, width, BLOCK_D)
        q += batch * q_b
        grad += batch * grad_b
        pairs += z * tokens * SLOTS
        head = key_head * group + tl.arange(0, ROWS) % GROUP
        for start in range(first, last, ROWS // GROUP):
            pair, inside = _pairs_from(start, last, pairs, group, GROUP, ROWS)
            t = pair // SLOTS
            q_tile = _rows(q, t * q_t + head * q_h, inside, width, BLOCK_D)
            grad_tile = _rows(grad, t * grad_t + head * grad_h, inside, width, BLOCK_D)
            row = (batch * tokens + t) * heads + head
            lse_tile, delta_tile, gate_tile = _numbers_of_rows(lse, delta, gate, row, inside)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            slope = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            seen = (key[None, :] <= t[:, None]) & real[None, :]
            weights = tl.where(seen, tl.exp2(scores * scale - lse_tile[:, None]), 0.0)
            slope = (weights * (slope - delta_tile[:, None])).to(k_tile.dtype)
            result = tl.dot(slope, k_tile, input_precision=PRECISION) * (gate_tile * natural_scale)[:, None]
            place = ((batch * (to_token - from_token) - from_token) * SLOTS + pair) * heads + head
            _store_rows(parts, place * width, inside, width, result, BLOCK_D)


@triton.jit
def add_parts(
    parts, chosen, dq,
    from_token, to_token, tokens, heads, group, width,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq, which holds the other branches', plus the parts of the row's pairs."""
    batch, token, head, real = _tokens_and_heads(from_token, to_token, heads, ROWS)
    place = (batch * (to_token - from_token) + token) * SLOTS
    token = batch * tokens + from_token + token
    slots_at = chosen + (token * (heads // group) + head // group) * SLOTS
    at = (token * heads + head) * width
    acc = _rows(dq, at, real, width, BLOCK_D).to(tl.float32)
    for number in range(SLOTS):
        there = real & (tl.load(slots_at + number, mask=real, other=-1) >= 0)
        part = _rows(parts, ((place + number) * heads + head) * width, there, width, BLOCK_D)
        acc += part.to(tl.float32)
    _store_rows(dq, at, real, width, acc, BLOCK_D)


@triton.jit
def pair_key_gradient(
    q, q_b, q_t, q_h,
    k, k_b, k_t, k_h,
    v, v_b, v_t, v_h,
    grad, grad_b, grad_t, grad_h,
    dk, dv,  # [B, T, H, D], contiguous, holding the window's
    more,  # [B, H, pieces beyond the first of their blocks, 2, BLOCK_N, D] fp32
    lse, delta, gate,
    pairs, work_block, work_first, work_last,
    tokens, heads, group, blocks, width, scale, natural_scale, work, more_work,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block's dk and dv from a range of its pairs: the first adds to dk and dv, others go to `more`."""
    z, piece = (tl.program_id(0) // work).to(tl.int64), tl.program_id(0) % work
    item = tl.program_id(0)
    block = tl.load(work_block + item)
    if block >= 0:
        first, last = tl.load(work_first + item), tl.load(work_last + item)
        is_first = piece == 0
        if piece > 0:
            is_first = tl.load(work_block + item - 1) != block
        key_heads = heads // group
        batch, key_head = z // key_heads, z % key_heads
        key, real = _keys_of_block(block, tokens, BLOCK, BLOCK_N)
        wide_key = key.to(tl.int64)
        k_tile = _rows(k + batch * k_b + key_head * k_h, wide_key * k_t, real, width, BLOCK_D)
        v_tile = _rows(v + batch * v_b + key_head * v_h, wide_key * v_t, real, width, BLOCK_D)
        q += batch * q_b
        grad += batch * grad_b
        pairs += z * tokens * SLOTS
        head = key_head * group + tl.arange(0, ROWS) % GROUP
        dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(first, last, ROWS // GROUP):
            pair, inside = _pairs_from(start, last, pairs, group, GROUP, ROWS)
            t = pair // SLOTS
            q_tile = _rows(q, t * q_t + head * q_h, inside, width, BLOCK_D)
            grad_tile = _rows(grad, t * grad_t + head * grad_h, inside, width, BLOCK_D)
            row = (batch * tokens + t) * heads + head
            lse_tile, delta_tile, gate_tile = _numbers_of_rows(lse, delta, gate, row, inside)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [keys, rows]
            seen = (key[:, None] <= t[None, :]) & real[:, None]
            weights = tl.where(seen, tl.exp2(scores * scale - lse_tile[None, :]), 0.0) * gate_tile[None, :]
            dv_tile = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv_tile, input_precision=PRECISION)
            slope = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
            slope = (weights * (slope - delta_tile[None, :])).to(q_tile.dtype)
            dk_tile = tl.dot(slope, q_tile, dk_tile, input_precision=PRECISION)
        dk_tile *= natural_scale
        if is_first:
            at = ((batch * tokens + key) * key_heads + key_head) * width
            dk_tile += _rows(dk, at, real, width, BLOCK_D).to(tl.float32)
            dv_tile += _rows(dv, at, real, width, BLOCK_D).to(tl.float32)
            _store_rows(dk, at, real, width, dk_tile, BLOCK_D)
            _store_rows(dv, at, real, width, dv_tile, BLOCK_D)
        else:
            # Every block has a first piece: this one is number piece - (block + 1) of the others.
            within = tl.arange(0, BLOCK_N)
            at = (z * more_work + piece - block - 1) * 2 * BLOCK_N * width + within * width
            _store_rows(more, at, within < BLOCK_N, width, dk_tile, BLOCK_D)
            _store_rows(more, at + BLOCK_N * width, within < BLOCK_N, width, dv_tile, BLOCK_D)


@triton.jit
def add_more(
    more, dk, dv,
    work_start,  # [B, H, blocks + 1] int32: the first piece of each block
    tokens, key_heads, blocks, width, more_work,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv plus what further pieces of the block's work have left in `more`."""
    z, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    first = tl.load(work_start + z * (blocks + 1) + block)
    last = tl.load(work_start + z * (blocks + 1) + block + 1)
    if last > first + 1:
        batch, key_head = z // key_heads, z % key_heads
        key, real = _keys_of_block(block, tokens, BLOCK, BLOCK_N)
        at = ((batch * tokens + key) * key_heads + key_head) * width
        dk_tile = _rows(dk, at, real, width, BLOCK_D).to(tl.float32)
        dv_tile = _rows(dv, at, real, width, BLOCK_D).to(tl.float32)
        start = z * more_work * 2 * BLOCK_N * width + tl.arange(0, BLOCK_N) * width
        for piece in range(first + 1, last):
            place = start + (piece - block - 1).to(tl.int64) * 2 * BLOCK_N * width
            dk_tile += _rows(more, place, real, width, BLOCK_D)
            dv_tile += _rows(more, place + BLOCK_N * width, real, width, BLOCK_D)
        _store_rows(dk, at, real, width, dk_tile, BLOCK_D)
        _store_rows(dv, at, real, width, dv_tile, BLOCK_D)


@triton.jit
def row_products(
    grad, grad_b, grad_t, grad_h,
    compressed, selected, nearby,  # [B, T, Q, D]
    delta_cmp, delta_win,  # [B, Q, T] fp32
    delta_slc,  # [B, T, Q] fp32
    tokens, heads, width,
    TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """grad . out of each branch: its gate's gradient, and what its softmax's gradient subtracts."""
    tiles = tl.cdiv(tokens, TOKENS)
    z = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = z // heads, z % heads
    t = (tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    real = t < tokens
    row = (batch * tokens + t) * heads + head
    g_tile = _rows(grad + batch * grad_b + head * grad_h, t * grad_t, real, width, BLOCK_D).to(tl.float32)
    value = tl.sum(g_tile * _rows(compressed, row * width, real, width, BLOCK_D).to(tl.float32), 1)
    tl.store(delta_cmp + z * tokens + t, value, mask=real)
    value = tl.sum(g_tile * _rows(nearby, row * width, real, width, BLOCK_D).to(tl.float32), 1)
    tl.store(delta_win + z * tokens + t, value, mask=real)
    value = tl.sum(g_tile * _rows(selected, row * width, real, width, BLOCK_D).to(tl.float32), 1)
    tl.store(delta_slc + row, value, mask=real)
