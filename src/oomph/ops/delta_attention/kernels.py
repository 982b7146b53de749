# mypy: disable-error-code="no-untyped-def"
"""Kernels of KDA: the work inside chunks (intra-chunk), the state recurrence over chunks, and both backward.

Legend: C tokens of a chunk, i and j two of them (j before i), la the log-decay, g its cumulative sum.

With Akk_ij = sum_k k_i k_j exp(g_i - g_j) for j < i and S the state before the chunk:
    X = (I + diag(beta) Akk)^-1     w = X diag(beta) (exp(g) k)     u = X diag(beta) v
    Aqk_ij = scale * sum_k q_i k_j exp(g_i - g_j) for j <= i
    qg_i = scale * q_i exp(g_i)     kg_j = k_j exp(g_last - g_j)
    v_new = u - w S     o = qg S + Aqk v_new     S' = exp(g_last) S + kg^T v_new
`prepare_chunks` computes all that does not depend on S.

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

# Triton would compile again for values that are 1 or multiples of 16.
NOT_SPECIALIZED = (
    "first_chunk chunks total_chunks tokens heads key_rows value_rows beta_b beta_t beta_h beta_share".split()
)


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


# States over chunks ----------------------------------------------------------------------------------
#
# The state recurrences over chunks: one program per sequence, head and slice of the value channels.
#
# Forward: v_new = u - w S, o = qg S + Aqk v_new, then S = decay * S + kg^T v_new. Backward, from the last
# chunk to the first: dv_new = Aqk^T do + kg dS, then dS = decay * dS + qg^T do - w^T dv_new. The state is
# float32 in registers; products take it in the dtype of k.


@triton.jit
def sequence_chunks(sequence, sequence_chunk, first_chunk, chunks, total_chunks, PACKED: tl.constexpr):
    """A sequence's first and last chunk, and those of its part in this segment."""
    if PACKED:
        begin = tl.load(sequence_chunk + sequence).to(tl.int32)
        end = tl.load(sequence_chunk + sequence + 1).to(tl.int32)
    else:
        begin = 0
        end = total_chunks
    return begin, end, tl.maximum(begin, first_chunk), tl.minimum(end, first_chunk + chunks)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_states(
    w, kg, qg, u, Aqk, decay,
    o, states, initial, state_before, state_after, final,
    chunk_start, chunk_rows, sequence_chunk,
    first_chunk, chunks, total_chunks, tokens, heads, key_rows, value_rows,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr, WHOLE_KEYS: tl.constexpr, WHOLE_VALUES: tl.constexpr,
    HAS_INITIAL: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """Stores o and the state after the segment with OUTPUT, else v_new (in u) and every chunk's state."""
    program = tl.program_id(0)
    slices: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    sequence_head = (program // slices).to(tl.int64)
    sequence = sequence_head // heads
    head = sequence_head % heads
    begin, end, first, last = sequence_chunks(
        sequence, sequence_chunk, first_chunk, chunks, total_chunks, PACKED
    )
    if first >= last:
        return
    batch = sequence
    if PACKED:
        batch = sequence * 0
    batch_head = batch * heads + head
    i = tl.arange(0, CHUNK)
    kc = tl.arange(0, BLOCK_K)
    vc = (program % slices) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = w.dtype.element_ty
    square = i[:, None] * CHUNK + i[None, :]
    in_state = kc[:, None] * DV + vc[None, :]
    has_state = (kc < DK)[:, None] & (vc < DV)[None, :]
    own_state = sequence_head * DK * DV + in_state
    carried_state = batch_head * DK * DV + in_state

    state = tl.load(state_before + carried_state, mask=has_state & (first > begin), other=0.0)
    if HAS_INITIAL:
        state += tl.load(initial + own_state, mask=has_state & (first == begin), other=0.0).to(tl.float32)
    for chunk in range(first, last):
        start, rows = chunk_bounds(chunk, chunk_start, chunk_rows, tokens, CHUNK, PACKED)
        has_row = i < rows
        key_row = scratch_row(batch, start, first_chunk, chunk_start, key_rows, CHUNK, PACKED, WHOLE_KEYS)
        key_offset = (key_row * heads + head) * DK
        value_row = scratch_row(
            batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES
        )
        value_offset = (value_row * heads + head) * DV
        tile_index = batch_head * chunks + (chunk - first_chunk)
        w_tile = load_tile(w + key_offset, i, kc, heads * DK, has_row, DK)
        k_tile = load_tile(kg + key_offset, i, kc, heads * DK, has_row, DK)
        rounded = state.to(dtype)
        v_new = load_tile(u + value_offset, i, vc, heads * DV, has_row, DV).to(tl.float32)
        v_new -= tl.dot(w_tile, rounded, input_precision=PRECISION)
        v_new_out = v_new.to(dtype)
        if OUTPUT:
            q_tile = load_tile(qg + key_offset, i, kc, heads * DK, has_row, DK)
            Aqk_tile = tl.load(Aqk + tile_index * CHUNK * CHUNK + square)
            out = tl.dot(q_tile, rounded, input_precision=PRECISION)
            out = tl.dot(Aqk_tile, v_new_out, out, input_precision=PRECISION)
            store_tile(
                o + ((batch * tokens + start) * heads + head) * DV, i, vc, heads * DV, has_row, DV, out
            )
        else:
            store_tile(u + value_offset, i, vc, heads * DV, has_row, DV, v_new_out)
            tl.store(states + tile_index * DK * DV + in_state, rounded, mask=has_state)
        factor = tl.load(decay + 3 * tile_index * DK + kc, mask=kc < DK, other=0.0)
        state = state * factor[:, None]
        state = tl.dot(tl.trans(k_tile), v_new_out, state, input_precision=PRECISION)
    if OUTPUT:
        tl.store(final + own_state, state, mask=has_state & (last == end))
        tl.store(state_after + carried_state, state, mask=has_state & (last < end))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def backward_states(
    w, kg, qg, Aqk, decay,
    grad_o, grad_v_new, grad_states, grad_initial, grad_before, grad_after, grad_final,
    chunk_start, chunk_rows, sequence_chunk,
    first_chunk, chunks, total_chunks, tokens, heads, key_rows, value_rows,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr, WHOLE_KEYS: tl.constexpr, WHOLE_VALUES: tl.constexpr,
    HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores dv_new, and for each chunk the gradient of the state after it."""
    program = tl.program_id(0)
    slices: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    sequence_head = (program // slices).to(tl.int64)
    sequence = sequence_head // heads
    head = sequence_head % heads
    begin, end, first, last = sequence_chunks(
        sequence, sequence_chunk, first_chunk, chunks, total_chunks, PACKED
    )
    if first >= last:
        return
    batch = sequence
    if PACKED:
        batch = sequence * 0
    batch_head = batch * heads + head
    i = tl.arange(0, CHUNK)
    kc = tl.arange(0, BLOCK_K)
    vc = (program % slices) * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = w.dtype.element_ty
    square = i[:, None] * CHUNK + i[None, :]
    in_state = kc[:, None] * DV + vc[None, :]
    has_state = (kc < DK)[:, None] & (vc < DV)[None, :]
    own_state = sequence_head * DK * DV + in_state
    carried_state = batch_head * DK * DV + in_state

    grad = tl.load(grad_after + carried_state, mask=has_state & (last < end), other=0.0)
    if HAS_FINAL:
        grad += tl.load(grad_final + own_state, mask=has_state & (last == end), other=0.0).to(tl.float32)
    for turn in range(first, last):
        chunk = last - 1 - (turn - first)
        start, rows = chunk_bounds(chunk, chunk_start, chunk_rows, tokens, CHUNK, PACKED)
        has_row = i < rows
        key_row = scratch_row(batch, start, first_chunk, chunk_start, key_rows, CHUNK, PACKED, WHOLE_KEYS)
        key_offset = (key_row * heads + head) * DK
        value_row = scratch_row(
            batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES
        )
        value_offset = (value_row * heads + head) * DV
        tile_index = batch_head * chunks + (chunk - first_chunk)
        rounded = grad.to(dtype)
        tl.store(grad_states + tile_index * DK * DV + in_state, rounded, mask=has_state)
        k_tile = load_tile(kg + key_offset, i, kc, heads * DK, has_row, DK)
        q_tile = load_tile(qg + key_offset, i, kc, heads * DK, has_row, DK)
        w_tile = load_tile(w + key_offset, i, kc, heads * DK, has_row, DK)
        Aqk_tile = tl.load(Aqk + tile_index * CHUNK * CHUNK + square)
        grad_out = load_tile(
            grad_o + ((batch * tokens + start) * heads + head) * DV, i, vc, heads * DV, has_row, DV
        )
        grad_out = grad_out.to(dtype)
        dv_new = tl.dot(tl.trans(Aqk_tile), grad_out, input_precision=PRECISION)
        dv_new = tl.dot(k_tile, rounded, dv_new, input_precision=PRECISION)
        dv_new_out = dv_new.to(dtype)
        store_tile(grad_v_new + value_offset, i, vc, heads * DV, has_row, DV, dv_new_out)
        factor = tl.load(decay + 3 * tile_index * DK + kc, mask=kc < DK, other=0.0)
        grad = grad * factor[:, None]
        grad = tl.dot(tl.trans(q_tile), grad_out, grad, input_precision=PRECISION)
        grad -= tl.dot(tl.trans(w_tile), dv_new_out, input_precision=PRECISION)
    tl.store(grad_before + carried_state, grad, mask=has_state & (first > begin))
    if HAS_INITIAL:
        tl.store(grad_initial + own_state, grad, mask=has_state & (first == begin))


# Backward of chunks ----------------------------------------------------------------------------------
#
# Gradients of a chunk's inputs, given the states before the chunks and the gradients of those after them.
#
# With S the state before the chunk and y = beta (v - (exp(g) k) S), v_new = X y. So dy = X^T dv_new and
# d(diag(beta) Akk) = -dy v_new^T below the diagonal. The rest is the chain rule through the products with
# decays, in bounded chunks at once and otherwise level by level, as in the forward pass.
#
# The gradient of g_i is q_i dq_i + k_i dk_i of k_i as a row of Akk, less k_i dk_i of k_i as a column of Akk
# and Aqk, and that of log_alpha_i the sum of those from i on. A pair of tokens that are both in this sum
# appears in it once as a row and once as a column, with opposite signs, and must cancel: both terms are
# computed from the same rounded factors. With q and k in place of their rounded products with decays, what
# remains of these pairs would be the larger part of the gradient's error in bfloat16.
#
# There are two kernels, so that no program reads what it has stored itself. In the second a slice of the key
# channels is a program: a loop over slices would hold the pointers of all its tiles in registers. No first
# operand of a product is transposed in registers, which Triton 3.4 to 3.7.0 compile wrongly for Hopper; tiles
# that are needed both ways are stored both ways.


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def intra_chunk_backward_values(
    v, beta,
    grad_o, v_new, grad_v_new, Aqk, Akk_inv,
    grad_v, grad_beta,
    chunk_start, chunk_rows,
    scale,
    first_chunk, chunks, tokens, heads, value_rows,
    v_b, v_t, v_h, beta_b, beta_t, beta_h,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, WHOLE_VALUES: tl.constexpr, GRAD_V: tl.constexpr, GRAD_BETA: tl.constexpr,
):  # fmt: skip
    """One program per chunk and head: dv, a part of dbeta, and dy in place of dv_new.

    The gradients of Aqk and of diag(beta) Akk overwrite Aqk and X as symmetric matrices, so that the second
    kernel reads their transposes without transposing. The diagonal is that of the gradient of Aqk.
    """
    program = tl.program_id(0)
    local = program % chunks
    batch_head = (program // chunks).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    start, rows = chunk_bounds(first_chunk + local, chunk_start, chunk_rows, tokens, CHUNK, PACKED)
    if rows <= 0:
        return
    i = tl.arange(0, CHUNK)
    has_row = i < rows
    dtype = v.dtype.element_ty
    v += batch * v_b + start.to(tl.int64) * v_t + head * v_h
    beta += batch * beta_b + start.to(tl.int64) * beta_t + head * beta_h
    beta_i = tl.load(beta + i * beta_t, mask=has_row, other=0.0).to(tl.float32)
    token_head = (batch * tokens + start) * heads + head
    value_row = scratch_row(batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES)
    value_at = (value_row * heads + head) * DV
    value_stride = heads * DV
    tile_index = (batch_head * chunks + local) * CHUNK * CHUNK
    square = i[:, None] * CHUNK + i[None, :]
    x_t = tl.trans(tl.load(Akk_inv + tile_index + square))

    grad_a = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    grad_s = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    grad_beta_i = tl.zeros([CHUNK], dtype=tl.float32)
    for v0 in range(0, DV, BLOCK_V):
        vc = v0 + tl.arange(0, BLOCK_V)
        dy = tl.dot(
            x_t, load_tile(grad_v_new + value_at, i, vc, value_stride, has_row, DV), input_precision=PRECISION
        )
        dy_out = dy.to(dtype)
        v_new_t = tl.trans(load_tile(v_new + value_at, i, vc, value_stride, has_row, DV))
        grad_a = tl.dot(dy_out, v_new_t, grad_a, input_precision=PRECISION)
        grad_out = load_tile(grad_o + token_head * DV, i, vc, value_stride, has_row, DV).to(dtype)
        grad_s = tl.dot(grad_out, v_new_t, grad_s, input_precision=PRECISION)
        store_tile(grad_v_new + value_at, i, vc, value_stride, has_row, DV, dy_out)
        if GRAD_V:
            store_tile(grad_v + token_head * DV, i, vc, value_stride, has_row, DV, dy * beta_i[:, None])
        if GRAD_BETA:
            grad_beta_i += tl.sum(dy * load_tile(v, i, vc, v_t, has_row, DV).to(tl.float32), axis=1)
    flipped = i[None, :] * CHUNK + i[:, None]
    below = i[:, None] > i[None, :]
    grad_a_out = (-grad_a).to(dtype)
    grad_s_out = (grad_s * scale).to(dtype)
    tl.store(Akk_inv + tile_index + square, grad_a_out, mask=below)
    tl.store(Akk_inv + tile_index + flipped, grad_a_out, mask=below)
    tl.store(Aqk + tile_index + square, grad_s_out, mask=i[:, None] >= i[None, :])
    tl.store(Aqk + tile_index + flipped, grad_s_out, mask=below)
    if GRAD_BETA:
        tl.store(grad_beta + token_head + i * heads, grad_beta_i, mask=has_row)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def intra_chunk_backward_keys(
    q, k, log_alpha, beta,
    grad_o, v_new, dy,
    states, grad_states, Aqk, Akk_inv, decay, bounded,
    grad_q, grad_k, grad_la, grad_beta,
    chunk_start, chunk_rows,
    scale,
    first_chunk, chunks, tokens, heads, value_rows, beta_share,
    q_b, q_t, q_h, k_b, k_t, k_h, la_b, la_t, la_h, beta_b, beta_t, beta_h,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    LEVELS: tl.constexpr, PARTS: tl.constexpr, GRADIENT_PARTS: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, WHOLE_VALUES: tl.constexpr, GRAD_Q: tl.constexpr, GRAD_K: tl.constexpr,
    GRAD_LA: tl.constexpr, GRAD_BETA: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """One program per chunk, head and slice of the key channels: dq, dk, dlog_alpha, a part of dbeta.

    Launched twice, for bounded chunks and for the others; a program returns at once for a chunk of the other
    kind.
    """
    program = tl.program_id(0)
    SLICES: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    part = program % SLICES
    local = (program // SLICES) % chunks
    batch_head = (program // SLICES // chunks).to(tl.int64)
    batch = batch_head // heads
    head = batch_head % heads
    start, rows = chunk_bounds(first_chunk + local, chunk_start, chunk_rows, tokens, CHUNK, PACKED)
    if rows <= 0:
        return
    tile_index = batch_head * chunks + local
    if (tl.load(bounded + tile_index) == 1) != BOUNDED:
        return
    i = tl.arange(0, CHUNK)
    has_row = i < rows
    kc = part * BLOCK_K + tl.arange(0, BLOCK_K)
    dtype = k.dtype.element_ty
    ROUNDED: tl.constexpr = dtype != tl.float32  # are the factors of matrix products
    token_head = (batch * tokens + start) * heads + head
    value_row = scratch_row(batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES)
    value_at = (value_row * heads + head) * DV
    value_stride = heads * DV

    dq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dk_row = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    dk_col = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    state_dot_grad = tl.zeros([BLOCK_K], dtype=tl.float32)
    for v0 in range(0, DV, BLOCK_V):
        vc = v0 + tl.arange(0, BLOCK_V)
        in_state = tile_index * DK * DV + kc[None, :] * DV + vc[:, None]
        has_state = (kc < DK)[None, :] & (vc < DV)[:, None]
        state = tl.load(states + in_state, mask=has_state, other=0.0)
        grad_out = load_tile(grad_o + token_head * DV, i, vc, value_stride, has_row, DV).to(dtype)
        dq = tl.dot(grad_out, state, dq, input_precision=PRECISION)
        dy_tile = load_tile(dy + value_at, i, vc, value_stride, has_row, DV)
        dk_row = tl.dot(dy_tile, state, dk_row, input_precision=PRECISION)
        grad_state = tl.load(grad_states + in_state, mask=has_state, other=0.0)
        v_new_tile = load_tile(v_new + value_at, i, vc, value_stride, has_row, DV)
        dk_col = tl.dot(v_new_tile, grad_state, dk_col, input_precision=PRECISION)
        state_dot_grad += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), axis=0)

    beta += batch * beta_b + start.to(tl.int64) * beta_t + head * beta_h
    beta_i = tl.load(beta + i * beta_t, mask=has_row, other=0.0).to(tl.float32)
    q += batch * q_b + start.to(tl.int64) * q_t + head * q_h
    k += batch * k_b + start.to(tl.int64) * k_t + head * k_h
    log_alpha += batch * la_b + start.to(tl.int64) * la_t + head * la_h
    la_tile = load_log_decay(log_alpha, i, kc, la_t, has_row, DK, PARTS)
    k_tile = load_tile(k, i, kc, k_t, has_row, DK)
    q_tile = load_tile(q, i, kc, q_t, has_row, DK)
    sums_at = tile_index * 3 * DK
    total = tl.load(decay + sums_at + kc, mask=kc < DK, other=0.0)
    square = tile_index * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    if BOUNDED:
        first_half = tl.load(decay + sums_at + DK + kc, mask=kc < DK, other=0.0)
        second_half = tl.load(decay + sums_at + 2 * DK + kc, mask=kc < DK, other=0.0)
        distance = cumulative_log_decay(la_tile, i, PARTS) - first_half[None, :]
        row_decay = tl.exp(distance)
        col_decay = tl.exp(-distance)
        k_col = (k_tile * col_decay).to(dtype)
        q_row = (q_tile * row_decay).to(dtype)
        k_row = (k_tile * row_decay * beta_i[:, None]).to(dtype)
        dk_col = dk_col * tl.exp(second_half)[None, :]
        # The decay of the whole chunk acts on the state and on every key that is written to it.
        grad_total = state_dot_grad * total
        if ROUNDED:
            grad_total += tl.sum(k_col * dk_col, axis=0)
        else:  # equal; in this order ptxas does not spill 12 KiB per thread
            grad_total += tl.sum(k_tile * dk_col * col_decay, axis=0)
        start_to_middle = tl.exp(first_half)[None, :]
        below = i[:, None] > i[None, :]
        above = i[:, None] < i[None, :]
        s_tile = tl.load(Aqk + square)
        a_tile = tl.load(Akk_inv + square)
        dq = dq * start_to_middle * scale
        dq = tl.dot(tl.where(below, s_tile, 0.0).to(dtype), k_col, dq, input_precision=PRECISION)
        dk_row = dk_row * -start_to_middle
        dk_row = tl.dot(tl.where(below, a_tile, 0.0).to(dtype), k_col, dk_row, input_precision=PRECISION)
        dk_col = tl.dot(tl.where(above, s_tile, 0.0).to(dtype), q_row, dk_col, input_precision=PRECISION)
        dk_col = tl.dot(tl.where(above, a_tile, 0.0).to(dtype), k_row, dk_col, input_precision=PRECISION)
        if ROUNDED:
            grad_g = q_row * dq + k_row * dk_row - k_col * dk_col
            if GRAD_LA:  # here, for fewer live registers
                grad_decay = masked_token_sums(i[None, :] >= i[:, None], grad_g, GRADIENT_PARTS)
                grad_decay += grad_total[None, :]
                store_tile(grad_la + token_head * DK, i, kc, heads * DK, has_row, DK, grad_decay)
        dq = dq * row_decay
        dk_row = dk_row * row_decay
        dk_col = dk_col * col_decay
    else:
        from_start = tl.exp(cumulative_log_decay(la_tile, i, PARTS))
        dq = dq * from_start * scale
        dk_row = dk_row * -from_start
        dk_col = dk_col * decay_to_end(la_tile, i, PARTS)
        grad_total = state_dot_grad * total + tl.sum(k_tile * dk_col, axis=0)
        grad_g = q_tile * dq + k_tile * (dk_row * beta_i[:, None] - dk_col)
        zeros = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        for level in range(LEVELS):
            half = decay_to_middle(la_tile, i, level, PARTS)
            pairs = level_pairs(i[:, None], i[None, :], level)
            pairs_t = level_pairs(i[None, :], i[:, None], level)
            k_half = (k_tile * half).to(dtype)
            q_half = (q_tile * half).to(dtype)
            k_beta_half = (k_tile * half * beta_i[:, None]).to(dtype)
            s_tile = tl.load(Aqk + square, mask=pairs, other=0.0)
            level_grad = tl.dot(s_tile, k_half, zeros, input_precision=PRECISION)
            grad_g += q_half * level_grad
            dq += half * level_grad
            a_tile = tl.load(Akk_inv + square, mask=pairs, other=0.0)
            level_grad = tl.dot(a_tile, k_half, zeros, input_precision=PRECISION)
            grad_g += k_beta_half * level_grad
            dk_row += half * level_grad
            s_tile = tl.load(Aqk + square, mask=pairs_t, other=0.0)
            a_tile = tl.load(Akk_inv + square, mask=pairs_t, other=0.0)
            level_grad = tl.dot(s_tile, q_half, zeros, input_precision=PRECISION)
            level_grad = tl.dot(a_tile, k_beta_half, level_grad, input_precision=PRECISION)
            grad_g -= k_half * level_grad
            dk_col += half * level_grad
    if GRAD_BETA:
        grad_beta += (part + 1).to(tl.int64) * beta_share + token_head
        tl.store(grad_beta + i * heads, tl.sum(k_tile * dk_row, axis=1), mask=has_row)
    dk_row = dk_row * beta_i[:, None]
    if BOUNDED and not ROUNDED:
        grad_g = q_tile * dq + k_tile * (dk_row - dk_col)
    if GRAD_LA and not (BOUNDED and ROUNDED):
        grad_decay = masked_token_sums(i[None, :] >= i[:, None], grad_g, GRADIENT_PARTS) + grad_total[None, :]
        store_tile(grad_la + token_head * DK, i, kc, heads * DK, has_row, DK, grad_decay)
    diagonal = tl.load(Aqk + tile_index * CHUNK * CHUNK + i * (CHUNK + 1)).to(tl.float32)
    if GRAD_Q:
        store_tile(grad_q + token_head * DK, i, kc, heads * DK, has_row, DK, dq + k_tile * diagonal[:, None])
    if GRAD_K:
        dk = dk_row + dk_col + q_tile * diagonal[:, None]
        store_tile(grad_k + token_head * DK, i, kc, heads * DK, has_row, DK, dk)
