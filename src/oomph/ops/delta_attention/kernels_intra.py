# mypy: disable-error-code="no-untyped-def"
"""Kernels of the work inside chunks (intra-chunk), and the functions that all kernels of KDA share.

Legend: C tokens of a chunk, i and j two of them (j before i), la the log-decay, g its cumulative sum.

With Akk_ij = sum_k k_i k_j exp(g_i - g_j) for j < i and S the state before the chunk:
    X = (I + diag(beta) Akk)^-1     w = X diag(beta) (exp(g) k)     u = X diag(beta) v
    Aqk_ij = scale * sum_k q_i k_j exp(g_i - g_j) for j <= i
    qg_i = scale * q_i exp(g_i)     kg_j = k_j exp(g_last - g_j)
    v_new = u - w S     o = qg S + Aqk v_new     S' = exp(g_last) S + kg^T v_new
`prepare_chunks` computes all that does not depend on S; kernels_states.py has the state recurrence.

The decay from token j to token i, exp(g_i - g_j), is never above 1, but as a product exp(g_i) exp(-g_j)
either factor may leave the range of float32. So pairs are processed by level: at level s the chunk is cut
into blocks of 2 * 2^s tokens, and the pairs are those with i in the second half of a block and j in its first
half. The decay is then a product of two, from j to the middle and from the middle to i; both exponents are
sums of log-decays, hence <= 0, and every pair j < i belongs to exactly one level. In a bounded chunk, where
the log-decays of each half add up to little, exp(g_i - g_middle) and exp(g_middle - g_j) are in range and
serve all pairs at once.

Sums over tokens are products with matrices of zeros and ones on the tensor cores, exact because la is split
into PARTS bfloat16 numbers that add up to it.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_bounds(chunk, chunk_start, chunk_rows, tokens, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk, and its number of tokens."""
    if PACKED:
        start = tl.load(chunk_start + chunk).to(tl.int32)
        rows = tl.load(chunk_rows + chunk).to(tl.int32)
    else:
        start = chunk * CHUNK
        rows = tl.minimum(tokens - start, CHUNK)
    return start, rows


@triton.jit
def scratch_row(
    batch, start,
    first_chunk,
    chunk_start, rows,
    CHUNK: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The row that token `start` has in a scratch tensor: of the whole call, or of one segment of it."""
    if WHOLE:
        row = start
    elif PACKED:
        row = start - tl.load(chunk_start + first_chunk).to(tl.int32)
    else:
        row = start - first_chunk * CHUNK
    return batch.to(tl.int64) * rows + row


@triton.jit
def load_tile(pointer, rows, columns, row_stride, has_row, COLUMNS: tl.constexpr):
    """[rows, columns], zeros outside the tensor."""
    return tl.load(
        pointer + rows[:, None] * row_stride + columns[None, :],
        mask=has_row[:, None] & (columns < COLUMNS)[None, :],
        other=0.0,
    )


@triton.jit
def store_tile(pointer, rows, columns, row_stride, has_row, COLUMNS: tl.constexpr, value):
    tl.store(
        pointer + rows[:, None] * row_stride + columns[None, :],
        value.to(pointer.dtype.element_ty),
        mask=has_row[:, None] & (columns < COLUMNS)[None, :],
    )


@triton.jit
def load_log_decay(pointer, rows, columns, row_stride, has_row, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Log-decays [C, k], -10000 instead of less (or -inf): exp is 0 as well, and 0 * la is not NaN."""
    la = load_tile(pointer, rows, columns, row_stride, has_row, COLUMNS).to(tl.float32)
    la = tl.where(la < -10000.0, -10000.0, la)
    if PARTS == 1:
        la = la.to(tl.bfloat16)
    return la


@triton.jit
def masked_token_sums(mask, x, PARTS: tl.constexpr):
    """mask [C, C] @ x [C, k], as exact as a float32 sum: x is split into PARTS bfloat16 numbers.

    PARTS = 0 is for Triton's interpreter, which has no bfloat16 products.
    """
    total = tl.zeros(x.shape, dtype=tl.float32)
    if PARTS == 0:
        total = tl.dot(mask.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    else:
        mask = mask.to(tl.bfloat16)
        part = x.to(tl.bfloat16)
        total = tl.dot(mask, part, total, input_precision="tf32")
        if PARTS > 1:
            rest = x - part.to(tl.float32)
            part = rest.to(tl.bfloat16)
            total = tl.dot(mask, part, total, input_precision="tf32")
            if PARTS > 2:
                rest = rest - part.to(tl.float32)
                total = tl.dot(mask, rest.to(tl.bfloat16), total, input_precision="tf32")
    return total


@triton.jit
def decay_to_middle(la, i, level, PARTS: tl.constexpr):
    """[C, k]: the decay from the middle of a token's block, or to it where the token is in the first half."""
    row = i[:, None]
    column = i[None, :]
    is_later = ((row >> level) & 1) == 1
    middle = (((row >> (level + 1)) << 1) + 1) << level
    first = tl.where(is_later, middle, row + 1)
    last = tl.where(is_later, row, middle - 1)
    return tl.exp(masked_token_sums((column >= first) & (column <= last), la, PARTS))


@triton.jit
def level_pairs(later, earlier, level):
    """Which pairs of tokens belong to this level."""
    same = (later >> (level + 1)) == (earlier >> (level + 1))
    return same & (((later >> level) & 1) > ((earlier >> level) & 1))


@triton.jit
def half_sums(la, i, CHUNK: tl.constexpr):
    """[k]: the sums of the log-decays of the first and of the second half of the chunk."""
    first = tl.sum(tl.where(i[:, None] < CHUNK // 2, la.to(tl.float32), 0.0), axis=0)
    second = tl.sum(tl.where(i[:, None] < CHUNK // 2, 0.0, la.to(tl.float32)), axis=0)
    return first, second


@triton.jit
def cumulative_log_decay(la, i, PARTS: tl.constexpr):
    """[C, k]: g, the log-decay from the chunk's start to each token, inclusive."""
    return masked_token_sums(i[None, :] <= i[:, None], la, PARTS)


@triton.jit
def decay_to_end(la, i, PARTS: tl.constexpr):
    """[C, k]: the decay from each token, exclusive, to the end of the chunk."""
    return tl.exp(masked_token_sums(i[None, :] > i[:, None], la, PARTS))


# Triton would compile again for values that are 1 or multiples of 16.
NOT_SPECIALIZED = [
    "first_chunk",
    "chunks",
    "tokens",
    "heads",
    "key_rows",
    "value_rows",
    "beta_b",
    "beta_t",
    "beta_h",
]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def prepare_chunks(
    q, k, v, log_alpha, beta,
    w, kg, qg, u, Aqk, Akk_inv, decay, bounded,
    chunk_start, chunk_rows,
    scale,
    first_chunk, chunks, tokens, heads, key_rows, value_rows,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, la_b, la_t, la_h, beta_b, beta_t, beta_h,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
    WHOLE_KEYS: tl.constexpr, WHOLE_VALUES: tl.constexpr, STORE_INVERSE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One program per chunk and head. LIMIT: of the log-decay of each half of a bounded chunk."""
    program = tl.program_id(0)
    local = program % chunks  # the chunk, counted from the segment's first
    batch_head = (program // chunks).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    start, rows = chunk_bounds(first_chunk + local, chunk_start, chunk_rows, tokens, CHUNK, PACKED)
    if rows <= 0:
        return
    SLICES: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    i = tl.arange(0, CHUNK)
    has_row = i < rows
    dtype = k.dtype.element_ty
    q += batch * q_b + start.to(tl.int64) * q_t + head * q_h
    k += batch * k_b + start.to(tl.int64) * k_t + head * k_h
    v += batch * v_b + start.to(tl.int64) * v_t + head * v_h
    log_alpha += batch * la_b + start.to(tl.int64) * la_t + head * la_h
    beta_i = tl.load(
        beta + batch * beta_b + (start + i).to(tl.int64) * beta_t + head * beta_h, mask=has_row, other=0.0
    )
    beta_i = beta_i.to(tl.float32)

    columns = tl.arange(0, BLOCK_K)
    tile_index = batch_head * chunks + local
    sums_at = tile_index * 3 * DK
    bounded_channels = 0
    for k0 in range(0, DK, BLOCK_K):
        kc = k0 + columns
        la_tile = load_log_decay(log_alpha, i, kc, la_t, has_row, DK, PARTS)
        first_half, second_half = half_sums(la_tile, i, CHUNK)
        tl.store(decay + sums_at + kc, tl.exp(first_half + second_half), mask=kc < DK)
        tl.store(decay + sums_at + DK + kc, first_half, mask=kc < DK)
        tl.store(decay + sums_at + 2 * DK + kc, second_half, mask=kc < DK)
        # Counted, because a minimum would ignore NaN.
        bounded_channels += tl.sum(((first_half >= -LIMIT) & (second_half >= -LIMIT)).to(tl.int32), axis=0)
    is_bounded = bounded_channels == SLICES * BLOCK_K
    tl.store(bounded + tile_index, is_bounded.to(tl.int32))
    tl.debug_barrier()
    a_kk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    a_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if is_bounded:
        for k0 in range(0, DK, BLOCK_K):
            kc = k0 + columns
            la_tile = load_log_decay(log_alpha, i, kc, la_t, has_row, DK, PARTS)
            middle = tl.load(decay + sums_at + DK + kc, mask=kc < DK, other=0.0)
            distance = cumulative_log_decay(la_tile, i, PARTS) - middle[None, :]
            k_tile = load_tile(k, i, kc, k_t, has_row, DK)
            k_col = tl.trans((k_tile * tl.exp(-distance)).to(dtype))
            row_decay = tl.exp(distance)
            a_kk = tl.dot((k_tile * row_decay).to(dtype), k_col, a_kk, input_precision=PRECISION)
            q_tile = load_tile(q, i, kc, q_t, has_row, DK)
            a_qk = tl.dot((q_tile * row_decay).to(dtype), k_col, a_qk, input_precision=PRECISION)
        a_kk = tl.where(i[:, None] > i[None, :], a_kk, 0.0)
        a_qk = tl.where(i[:, None] >= i[None, :], a_qk, 0.0)
    else:
        diagonal = tl.zeros([CHUNK], dtype=tl.float32)
        for k0 in range(0, DK, BLOCK_K):
            k_tile = load_tile(k, i, k0 + columns, k_t, has_row, DK).to(tl.float32)
            diagonal += tl.sum(
                load_tile(q, i, k0 + columns, q_t, has_row, DK).to(tl.float32) * k_tile, axis=1
            )
        a_qk = tl.where(i[:, None] == i[None, :], diagonal[:, None], 0.0)
        for level in range(LEVELS):
            kk_level = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
            qk_level = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
            for k0 in range(0, DK, BLOCK_K):
                kc = k0 + columns
                la_tile = load_log_decay(log_alpha, i, kc, la_t, has_row, DK, PARTS)
                half = decay_to_middle(la_tile, i, level, PARTS)
                k_half = (load_tile(k, i, kc, k_t, has_row, DK) * half).to(dtype)
                q_half = (load_tile(q, i, kc, q_t, has_row, DK) * half).to(dtype)
                kk_level = tl.dot(k_half, tl.trans(k_half), kk_level, input_precision=PRECISION)
                qk_level = tl.dot(q_half, tl.trans(k_half), qk_level, input_precision=PRECISION)
            pairs = level_pairs(i[:, None], i[None, :], level)
            a_kk += tl.where(pairs, kk_level, 0.0)
            a_qk += tl.where(pairs, qk_level, 0.0)

    # The inverse is built level by level: from blocks of 2^s tokens to blocks twice as long, the part below
    # the diagonal is -X_later A X_earlier, for all blocks in one product. For one token X is the identity.
    a_kk = a_kk * beta_i[:, None]
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(
        level_pairs(i[:, None], i[None, :], 0), a_kk, 0.0
    )
    for level in range(1, LEVELS):
        below = tl.where(level_pairs(i[:, None], i[None, :], level), -a_kk, 0.0)
        below = tl.dot(below, x, tl.zeros([CHUNK, CHUNK], dtype=tl.float32), input_precision=PRECISION)
        x = tl.dot(x, below, x, input_precision=PRECISION)

    square = i[:, None] * CHUNK + i[None, :]
    tl.store(Aqk + tile_index * CHUNK * CHUNK + square, (a_qk * scale).to(dtype))
    if STORE_INVERSE:
        tl.store(Akk_inv + tile_index * CHUNK * CHUNK + square, x.to(dtype))
    x_out = x.to(dtype)

    key_row = scratch_row(batch, start, first_chunk, chunk_start, key_rows, CHUNK, PACKED, WHOLE_KEYS)
    key_stride = heads * DK
    key_offset = (key_row * heads + head) * DK
    for k0 in range(0, DK, BLOCK_K):
        kc = k0 + columns
        la_part = load_log_decay(log_alpha, i, kc, la_t, has_row, DK, PARTS)
        k_part = load_tile(k, i, kc, k_t, has_row, DK).to(tl.float32)
        q_part = load_tile(q, i, kc, q_t, has_row, DK).to(tl.float32)
        from_start = tl.exp(cumulative_log_decay(la_part, i, PARTS))
        written = (k_part * from_start * beta_i[:, None]).to(dtype)
        zeros = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        written = tl.dot(x_out, written, zeros, input_precision=PRECISION)
        store_tile(w + key_offset, i, kc, key_stride, has_row, DK, written)
        store_tile(qg + key_offset, i, kc, key_stride, has_row, DK, q_part * from_start * scale)
        to_end = decay_to_end(la_part, i, PARTS)
        store_tile(kg + key_offset, i, kc, key_stride, has_row, DK, k_part * to_end)

    value_row = scratch_row(batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES)
    value_offset = (value_row * heads + head) * DV
    value_columns = tl.arange(0, BLOCK_V)
    for v0 in range(0, DV, BLOCK_V):
        vc = v0 + value_columns
        written = (load_tile(v, i, vc, v_t, has_row, DV) * beta_i[:, None]).to(dtype)
        zeros = tl.zeros([CHUNK, BLOCK_V], dtype=tl.float32)
        written = tl.dot(x_out, written, zeros, input_precision=PRECISION)
        store_tile(u + value_offset, i, vc, heads * DV, has_row, DV, written)
