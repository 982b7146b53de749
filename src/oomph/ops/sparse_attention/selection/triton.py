"""Which blocks each token selects: importances of a segment of tokens, then the largest of each row.

The compressed attention's log-sum-exp is known, so every weight is final when it is computed, and is added to
its block's importance at once. Rows of a tile are (token, head of the group), GROUP (a power of two) per
token.
"""

import triton
import triton.language as tl


@triton.jit
def _rows_of(base, stride, rows, inside, width, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    return tl.load(
        base + rows.to(tl.int64)[:, None] * stride + columns[None, :],
        mask=inside[:, None] & (columns < width)[None, :],
        other=0.0,
    )


@triton.jit
def _add_up(
    q_tile, lse, t, ck, ck_n, out_row, real, first, last, n_keys, blocks, width, scale, CUT: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, UNITS_SPAN: tl.constexpr, UNITS: tl.constexpr,
    UNITS_PADDED: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Importances of the blocks first .. last - 1. Without CUT every row sees all their compressed blocks."""
    for start in range(first, last, BLOCKS):
        # The compressed blocks that begin in each block: UNITS of them, the last ones reach beyond it.
        column = tl.arange(0, BLOCKS * UNITS_PADDED)
        unit = column % UNITS_PADDED
        key = (start + column // UNITS_PADDED) * UNITS + unit
        there = (unit < UNITS) & (key < n_keys)
        k_tile = _rows_of(ck, ck_n, key, there, width, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        shared = tl.minimum(UNITS_SPAN, UNITS - unit).to(tl.float32)
        weights = tl.exp2(scores * scale - lse[:, None]) * shared[None, :]
        if CUT:
            seen = (key * STRIDE + SPAN - 1)[None, :] <= t[:, None]
            weights = tl.where(seen & there[None, :], weights, 0.0)
        elif UNITS < UNITS_PADDED:
            weights = tl.where((unit < UNITS)[None, :], weights, 0.0)
        total = tl.sum(tl.reshape(weights, (TOKENS * GROUP, BLOCKS, UNITS_PADDED)), 2)
        # Those that begin before a block and reach into it.
        block = start + tl.arange(0, BLOCKS)
        for before in tl.static_range(1, UNITS_SPAN):
            earlier = block * UNITS - before
            exists = (earlier >= 0) & (earlier < n_keys)
            k_before = _rows_of(ck, ck_n, earlier, exists, width, BLOCK_D)
            scores = tl.dot(q_tile, tl.trans(k_before), input_precision=PRECISION)
            seen = exists[None, :] & ((earlier * STRIDE + SPAN - 1)[None, :] <= t[:, None])
            weights = tl.exp2(scores * scale - lse[:, None]) * min(UNITS_SPAN - before, UNITS)
            total += tl.where(seen, weights, 0.0)
        total = tl.sum(tl.reshape(total, (TOKENS, GROUP, BLOCKS)), 1)
        place = out_row[:, None] + block[None, :]
        tl.store(place, total, mask=real[:, None] & (block < blocks)[None, :])


@triton.jit
def importance(
    q, q_b, q_t, q_h,
    ck, ck_b, ck_n, ck_h,
    lse,  # [B, Q, T], of the compressed attention
    out,  # [B, H, segment, blocks] fp32
    from_token, to_token, tokens, n_keys, heads, group, blocks, width, scale,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, UNITS_SPAN: tl.constexpr, UNITS: tl.constexpr,
    UNITS_PADDED: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per TOKENS tokens of a key/value head; all blocks that begin before the last of them."""
    key_heads = heads // group
    segment = to_token - from_token
    tiles = tl.cdiv(segment, TOKENS)
    per_tile = tl.num_programs(0) // tiles
    z = tl.program_id(0) % per_tile
    batch, key_head = (z // key_heads).to(tl.int64), (z % key_heads).to(tl.int64)
    # The last tokens, which see most, come first.
    first = from_token + (tiles - 1 - tl.program_id(0) // per_tile) * TOKENS
    row = tl.arange(0, TOKENS * GROUP)
    t, member = first + row // GROUP, row % GROUP
    inside = (t < to_token) & (member < group)
    head = key_head * group + member
    columns = tl.arange(0, BLOCK_D)
    q_tile = tl.load(
        q + batch * q_b + t.to(tl.int64)[:, None] * q_t + head[:, None] * q_h + columns[None, :],
        mask=inside[:, None] & (columns < width)[None, :],
        other=0.0,
    )
    lse_tile = tl.load(lse + (batch * heads + head) * tokens + t, mask=inside, other=float("inf"))
    ck += batch * ck_b + key_head * ck_h
    token = first + tl.arange(0, TOKENS)
    out_row = out + (z.to(tl.int64) * segment + (token - from_token)) * blocks
    real = token < to_token
    last_t = tl.minimum(first + TOKENS, to_token) - 1
    stop = tl.minimum(last_t // (UNITS * STRIDE) + 1, blocks)
    # Up to here the first token sees all compressed blocks, those of the last block included.
    whole = tl.maximum(first + 1 - SPAN, 0) // (UNITS * STRIDE)
    whole = tl.minimum(whole, n_keys // UNITS) // BLOCKS * BLOCKS
    _add_up(
        q_tile, lse_tile, t, ck, ck_n, out_row, real, 0, whole, n_keys, blocks, width, scale, False,
        SPAN, STRIDE, UNITS_SPAN, UNITS, UNITS_PADDED, TOKENS, GROUP, BLOCKS, BLOCK_D, PRECISION,
    )  # fmt: skip
    _add_up(
        q_tile, lse_tile, t, ck, ck_n, out_row, real, whole, stop, n_keys, blocks, width, scale, True,
        SPAN, STRIDE, UNITS_SPAN, UNITS, UNITS_PADDED, TOKENS, GROUP, BLOCKS, BLOCK_D, PRECISION,
    )  # fmt: skip


@triton.jit
def select(
    scores,  # [B, H, segment, blocks] fp32
    chosen,  # [B, T, H, SLOTS] int32
    from_token, to_token, tokens, key_heads, blocks,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    ONE_LOAD: tl.constexpr,
):  # fmt: skip
    """Slot 0: block 0; slot 1: the token's own; slot 2: the one before; then the most important. -1: none.

    Each slot takes the largest of what is left, the lower index where equal. Rows up to WIDTH are read once;
    of longer ones every slot reads all, and takes the largest that comes after the slot before it in the
    order (importance falling, index rising).
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
        values = _values(row, column, end)
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
                values = _values(row, index, end)
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
def _values(row, index, end):
    """Importances of the blocks from 1 to before `end`; -1 elsewhere, and where it is not a number."""
    free = (index >= 1)[None, :] & (index[None, :] < end[:, None])
    values = tl.load(row[:, None] + index[None, :], mask=free, other=-1.0)
    return tl.where(values >= 0.0, values, -1.0)
