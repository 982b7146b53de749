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
def _block_rows(base, stride, key, inside, width, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    place = base + key.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(place, mask=inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def _pair_rows(base, row, inside, width, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    return tl.load(
        base + row[:, None] + columns[None, :], mask=inside[:, None] & (columns < width)[None, :], other=0.0
    )


@triton.jit
def _store_pair_rows(base, row, inside, width, values, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (columns < width)[None, :]
    tl.store(base + row[:, None] + columns[None, :], values.to(base.dtype.element_ty), mask=mask)


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
    z = tl.program_id(1).to(tl.int64)
    item = z * work + tl.program_id(0)
    block = tl.load(work_block + item)
    if block >= 0:
        first, last = tl.load(work_first + item), tl.load(work_last + item)
        key_heads = heads // group
        batch, key_head = z // key_heads, z % key_heads
        within = tl.arange(0, BLOCK_N)
        key = block * BLOCK + within
        real = (within < BLOCK) & (key < tokens)
        k_tile = _block_rows(k + batch * k_b + key_head * k_h, k_t, key, real, width, BLOCK_D)
        v_tile = _block_rows(v + batch * v_b + key_head * v_h, v_t, key, real, width, BLOCK_D)
        q += batch * q_b
        pairs += z * tokens * SLOTS
        row = tl.arange(0, ROWS)
        head = key_head * group + row % GROUP
        member = row % GROUP < group
        for start in range(first, last, ROWS // GROUP):
            number = start + row // GROUP
            inside = (number < last) & member
            pair = tl.load(pairs + number, mask=inside, other=0).to(tl.int64)
            t = pair // SLOTS
            q_tile = _pair_rows(q, t * q_t + head * q_h, inside, width, BLOCK_D)
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
            _store_pair_rows(parts, place * width, inside, width, result, BLOCK_D)
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
    batch = tl.program_id(1).to(tl.int64)
    segment = to_token - from_token
    flat = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = flat // heads, flat % heads
    columns = tl.arange(0, BLOCK_D)
    real = token < segment
    inside = real[:, None] & (columns < width)[None, :]
    place = (batch * segment + token) * SLOTS
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
        row = ((place + number) * heads + head) * width
        part = tl.load(parts + row[:, None] + columns[None, :], mask=there[:, None] & inside, other=0.0)
        acc += tl.exp2(part_lse - value)[:, None] * part.to(tl.float32)
    row = token * heads + head
    tl.store(lse + row, value, mask=real)
    at = row[:, None] * width + columns[None, :]
    acc = acc.to(out.dtype.element_ty)
    if KEEP:
        tl.store(selected + at, acc, mask=inside)
    result = tl.load(gate_slc + row, mask=real, other=0.0).to(tl.float32)[:, None] * acc.to(tl.float32)
    other = tl.load(compressed + at, mask=inside, other=0.0).to(tl.float32)
    result += tl.load(gate_cmp + row, mask=real, other=0.0).to(tl.float32)[:, None] * other
    other = tl.load(nearby + at, mask=inside, other=0.0).to(tl.float32)
    result += tl.load(gate_win + row, mask=real, other=0.0).to(tl.float32)[:, None] * other
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


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
    z = tl.program_id(1).to(tl.int64)
    item = z * work + tl.program_id(0)
    block = tl.load(work_block + item)
    if block >= 0:
        first, last = tl.load(work_first + item), tl.load(work_last + item)
        key_heads = heads // group
        batch, key_head = z // key_heads, z % key_heads
        within = tl.arange(0, BLOCK_N)
        key = block * BLOCK + within
        real = (within < BLOCK) & (key < tokens)
        k_tile = _block_rows(k + batch * k_b + key_head * k_h, k_t, key, real, width, BLOCK_D)
        v_tile = _block_rows(v + batch * v_b + key_head * v_h, v_t, key, real, width, BLOCK_D)
        q += batch * q_b
        grad += batch * grad_b
        pairs += z * tokens * SLOTS
        row = tl.arange(0, ROWS)
        head = key_head * group + row % GROUP
        member = row % GROUP < group
        for start in range(first, last, ROWS // GROUP):
            number = start + row // GROUP
            inside = (number < last) & member
            pair = tl.load(pairs + number, mask=inside, other=0).to(tl.int64)
            t = pair // SLOTS
            q_tile = _pair_rows(q, t * q_t + head * q_h, inside, width, BLOCK_D)
            grad_tile = _pair_rows(grad, t * grad_t + head * grad_h, inside, width, BLOCK_D)
            numbers = (batch * tokens + t) * heads + head
            lse_tile = tl.load(lse + numbers, mask=inside, other=float("inf"))
            delta_tile = tl.load(delta + numbers, mask=inside, other=0.0)
            factor = tl.load(gate + numbers, mask=inside, other=0.0).to(tl.float32) * natural_scale
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            slope = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            seen = (key[None, :] <= t[:, None]) & real[None, :]
            weights = tl.where(seen, tl.exp2(scores * scale - lse_tile[:, None]), 0.0)
            slope = (weights * (slope - delta_tile[:, None])).to(k_tile.dtype)
            result = tl.dot(slope, k_tile, input_precision=PRECISION) * factor[:, None]
            place = ((batch * (to_token - from_token) - from_token) * SLOTS + pair) * heads + head
            _store_pair_rows(parts, place * width, inside, width, result, BLOCK_D)


@triton.jit
def add_parts(
    parts, chosen, dq,
    from_token, to_token, tokens, heads, group, width,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq, which holds the other branches', plus the parts of the row's pairs."""
    batch = tl.program_id(1).to(tl.int64)
    segment = to_token - from_token
    flat = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = flat // heads, flat % heads
    columns = tl.arange(0, BLOCK_D)
    real = token < segment
    inside = real[:, None] & (columns < width)[None, :]
    place = (batch * segment + token) * SLOTS
    token = batch * tokens + from_token + token
    slots_at = chosen + (token * (heads // group) + head // group) * SLOTS
    at = (token * heads + head)[:, None] * width + columns[None, :]
    acc = tl.load(dq + at, mask=inside, other=0.0).to(tl.float32)
    for number in range(SLOTS):
        there = real & (tl.load(slots_at + number, mask=real, other=-1) >= 0)
        row = ((place + number) * heads + head) * width
        part = tl.load(parts + row[:, None] + columns[None, :], mask=there[:, None] & inside, other=0.0)
        acc += part.to(tl.float32)
    tl.store(dq + at, acc.to(dq.dtype.element_ty), mask=inside)


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
    z = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(0)
    item = z * work + piece
    block = tl.load(work_block + item)
    if block >= 0:
        first, last = tl.load(work_first + item), tl.load(work_last + item)
        is_first = piece == 0
        if piece > 0:
            is_first = tl.load(work_block + item - 1) != block
        key_heads = heads // group
        batch, key_head = z // key_heads, z % key_heads
        within = tl.arange(0, BLOCK_N)
        key = block * BLOCK + within
        real = (within < BLOCK) & (key < tokens)
        k_tile = _block_rows(k + batch * k_b + key_head * k_h, k_t, key, real, width, BLOCK_D)
        v_tile = _block_rows(v + batch * v_b + key_head * v_h, v_t, key, real, width, BLOCK_D)
        q += batch * q_b
        grad += batch * grad_b
        pairs += z * tokens * SLOTS
        row = tl.arange(0, ROWS)
        head = key_head * group + row % GROUP
        member = row % GROUP < group
        dk_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv_tile = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(first, last, ROWS // GROUP):
            number = start + row // GROUP
            inside = (number < last) & member
            pair = tl.load(pairs + number, mask=inside, other=0).to(tl.int64)
            t = pair // SLOTS
            q_tile = _pair_rows(q, t * q_t + head * q_h, inside, width, BLOCK_D)
            grad_tile = _pair_rows(grad, t * grad_t + head * grad_h, inside, width, BLOCK_D)
            numbers = (batch * tokens + t) * heads + head
            lse_tile = tl.load(lse + numbers, mask=inside, other=float("inf"))
            delta_tile = tl.load(delta + numbers, mask=inside, other=0.0)
            gate_tile = tl.load(gate + numbers, mask=inside, other=0.0).to(tl.float32)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [keys, rows]
            seen = (key[:, None] <= t[None, :]) & real[:, None]
            weights = tl.where(seen, tl.exp2(scores * scale - lse_tile[None, :]), 0.0) * gate_tile[None, :]
            dv_tile = tl.dot(weights.to(grad_tile.dtype), grad_tile, dv_tile, input_precision=PRECISION)
            slope = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
            slope = (weights * (slope - delta_tile[None, :])).to(q_tile.dtype)
            dk_tile = tl.dot(slope, q_tile, dk_tile, input_precision=PRECISION)
        dk_tile *= natural_scale
        columns = tl.arange(0, BLOCK_D)
        if is_first:
            inside_block = real[:, None] & (columns < width)[None, :]
            at = ((batch * tokens + key) * key_heads + key_head)[:, None] * width + columns[None, :]
            dk_tile += tl.load(dk + at, mask=inside_block, other=0.0).to(tl.float32)
            dv_tile += tl.load(dv + at, mask=inside_block, other=0.0).to(tl.float32)
            tl.store(dk + at, dk_tile.to(dk.dtype.element_ty), mask=inside_block)
            tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside_block)
        else:
            # Every block has a first piece: this one is number piece - (block + 1) of the others.
            base = (z * more_work + piece - block - 1) * 2 * BLOCK_N * width
            at = base + within[:, None] * width + columns[None, :]
            inside_block = (within >= 0)[:, None] & (columns < width)[None, :]
            tl.store(more + at, dk_tile, mask=inside_block)
            tl.store(more + at + BLOCK_N * width, dv_tile, mask=inside_block)


@triton.jit
def add_more(
    more, dk, dv,
    work_start,  # [B, H, blocks + 1] int32: the first piece of each block
    tokens, key_heads, blocks, width, more_work,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk and dv plus what further pieces of the block's work have left in `more`."""
    z, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    first = tl.load(work_start + z * (blocks + 1) + block)
    last = tl.load(work_start + z * (blocks + 1) + block + 1)
    if last > first + 1:
        batch, key_head = z // key_heads, z % key_heads
        within, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        key = block * BLOCK + within
        inside = ((within < BLOCK) & (key < tokens))[:, None] & (columns < width)[None, :]
        at = ((batch * tokens + key) * key_heads + key_head)[:, None] * width + columns[None, :]
        dk_tile = tl.load(dk + at, mask=inside, other=0.0).to(tl.float32)
        dv_tile = tl.load(dv + at, mask=inside, other=0.0).to(tl.float32)
        start = more + z * more_work * 2 * BLOCK_N * width + within[:, None] * width + columns[None, :]
        for piece in range(first + 1, last):
            place = start + (piece - block - 1).to(tl.int64) * 2 * BLOCK_N * width
            dk_tile += tl.load(place, mask=inside, other=0.0)
            dv_tile += tl.load(place + BLOCK_N * width, mask=inside, other=0.0)
        tl.store(dk + at, dk_tile.to(dk.dtype.element_ty), mask=inside)
        tl.store(dv + at, dv_tile.to(dv.dtype.element_ty), mask=inside)


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
    z = tl.program_id(1).to(tl.int64)
    batch, head = z // heads, z % heads
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    real = t < tokens
    inside = real[:, None] & (columns < width)[None, :]
    row = (batch * tokens + t) * heads + head
    at = row[:, None] * width + columns[None, :]
    g = grad + batch * grad_b + head * grad_h + t[:, None] * grad_t + columns[None, :]
    g_tile = tl.load(g, mask=inside, other=0.0).to(tl.float32)
    value = tl.sum(g_tile * tl.load(compressed + at, mask=inside, other=0.0).to(tl.float32), 1)
    tl.store(delta_cmp + z * tokens + t, value, mask=real)
    value = tl.sum(g_tile * tl.load(nearby + at, mask=inside, other=0.0).to(tl.float32), 1)
    tl.store(delta_win + z * tokens + t, value, mask=real)
    value = tl.sum(g_tile * tl.load(selected + at, mask=inside, other=0.0).to(tl.float32), 1)
    tl.store(delta_slc + row, value, mask=real)
