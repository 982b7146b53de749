# mypy: disable-error-code="no-untyped-def"
"""What a chunk is worth without the state before it: one program per chunk and head.

With g the running sum of log-decays and A_ij = sum_k k_i k_j exp(g_i - g_j) for j < i:
X = (I + diag(beta) A)^-1, w = X diag(beta) (exp(g) k), u = X diag(beta) v, scores_ij = scale * sum_k q_i k_j
exp(g_i - g_j) for j <= i. The state S enters a chunk and leaves as decay * S + key_out^T (u - w S).
"""

import triton
import triton.language as tl

from oomph.ops.delta_attention.triton_blocks import (
    chunk_bounds,
    decay_to_end,
    decay_to_middle,
    half_sums,
    log_decay_tile,
    pairs_of,
    put,
    running_sums,
    scratch_row,
    tile,
)

# Not compiled anew for values that are multiples of 16, or 1.
COUNTS = ["first_chunk", "chunks", "tokens", "heads", "key_rows", "value_rows", "beta_b", "beta_t", "beta_h"]


@triton.jit(do_not_specialize=COUNTS)
def prepare_chunks(
    q,
    k,
    v,
    log_alpha,
    beta,
    w,
    key_out,
    query_in,
    u,
    scores,
    inverse,
    decay,
    narrow,
    chunk_start,
    chunk_rows,
    scale,
    first_chunk,
    chunks,
    tokens,
    heads,
    key_rows,
    value_rows,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
    v_b,
    v_t,
    v_h,
    la_b,
    la_t,
    la_h,
    beta_b,
    beta_t,
    beta_h,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE_KEYS: tl.constexpr,
    WHOLE_VALUES: tl.constexpr,
    KEEP_INVERSE: tl.constexpr,
    NARROW: tl.constexpr,
):
    program = tl.program_id(0)
    local = program % chunks
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
    strength = tl.load(
        beta + batch * beta_b + (start + i).to(tl.int64) * beta_t + head * beta_h, mask=has_row, other=0.0
    )
    strength = strength.to(tl.float32)

    columns = tl.arange(0, BLOCK_K)
    tile_at = batch_head * chunks + local
    sums_at = tile_at * 3 * DK
    shallow = 0
    for k0 in range(0, DK, BLOCK_K):
        kc = k0 + columns
        la_tile = log_decay_tile(log_alpha, i, kc, la_t, has_row, DK, PARTS)
        first_half, second_half = half_sums(la_tile, i, CHUNK)
        tl.store(decay + sums_at + kc, tl.exp(first_half + second_half), mask=kc < DK)
        tl.store(decay + sums_at + DK + kc, first_half, mask=kc < DK)
        tl.store(decay + sums_at + 2 * DK + kc, second_half, mask=kc < DK)
        # Counted, not compared as a minimum, which would pass over NaN.
        shallow += tl.sum(((first_half >= -NARROW) & (second_half >= -NARROW)).to(tl.int32), axis=0)
    is_narrow = shallow == SLICES * BLOCK_K
    tl.store(narrow + tile_at, is_narrow.to(tl.int32))
    tl.debug_barrier()
    a_kk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    a_qk = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    if is_narrow:
        for k0 in range(0, DK, BLOCK_K):
            kc = k0 + columns
            la_tile = log_decay_tile(log_alpha, i, kc, la_t, has_row, DK, PARTS)
            middle = tl.load(decay + sums_at + DK + kc, mask=kc < DK, other=0.0)
            distance = running_sums(la_tile, i, PARTS) - middle[None, :]
            k_tile = tile(k, i, kc, k_t, has_row, DK)
            k_earlier = tl.trans((k_tile * tl.exp(-distance)).to(dtype))
            later = tl.exp(distance)
            a_kk = tl.dot((k_tile * later).to(dtype), k_earlier, a_kk, input_precision=PRECISION)
            q_tile = tile(q, i, kc, q_t, has_row, DK)
            a_qk = tl.dot((q_tile * later).to(dtype), k_earlier, a_qk, input_precision=PRECISION)
        a_kk = tl.where(i[:, None] > i[None, :], a_kk, 0.0)
        a_qk = tl.where(i[:, None] >= i[None, :], a_qk, 0.0)
    else:
        diagonal = tl.zeros([CHUNK], dtype=tl.float32)
        for k0 in range(0, DK, BLOCK_K):
            k_tile = tile(k, i, k0 + columns, k_t, has_row, DK).to(tl.float32)
            diagonal += tl.sum(tile(q, i, k0 + columns, q_t, has_row, DK).to(tl.float32) * k_tile, axis=1)
        a_qk = tl.where(i[:, None] == i[None, :], diagonal[:, None], 0.0)
        for level in range(LEVELS):
            kk_level = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
            qk_level = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
            for k0 in range(0, DK, BLOCK_K):
                kc = k0 + columns
                la_tile = log_decay_tile(log_alpha, i, kc, la_t, has_row, DK, PARTS)
                half = decay_to_middle(la_tile, i, level, PARTS)
                k_half = (tile(k, i, kc, k_t, has_row, DK) * half).to(dtype)
                q_half = (tile(q, i, kc, q_t, has_row, DK) * half).to(dtype)
                kk_level = tl.dot(k_half, tl.trans(k_half), kk_level, input_precision=PRECISION)
                qk_level = tl.dot(q_half, tl.trans(k_half), qk_level, input_precision=PRECISION)
            pairs = pairs_of(i[:, None], i[None, :], level)
            a_kk += tl.where(pairs, kk_level, 0.0)
            a_qk += tl.where(pairs, qk_level, 0.0)

    # The inverse grows with the levels: from blocks of 2^s tokens to blocks twice as long, the part below the
    # diagonal is -X_later A X_earlier, all blocks in one product. For single tokens X is the identity.
    a_kk = a_kk * strength[:, None]
    x = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - tl.where(
        pairs_of(i[:, None], i[None, :], 0), a_kk, 0.0
    )
    for level in range(1, LEVELS):
        below = tl.where(pairs_of(i[:, None], i[None, :], level), -a_kk, 0.0)
        below = tl.dot(below, x, tl.zeros([CHUNK, CHUNK], dtype=tl.float32), input_precision=PRECISION)
        x = tl.dot(x, below, x, input_precision=PRECISION)

    square = i[:, None] * CHUNK + i[None, :]
    tl.store(scores + tile_at * CHUNK * CHUNK + square, (a_qk * scale).to(dtype))
    if KEEP_INVERSE:
        tl.store(inverse + tile_at * CHUNK * CHUNK + square, x.to(dtype))
    x_out = x.to(dtype)

    key_row = scratch_row(batch, start, first_chunk, chunk_start, key_rows, CHUNK, PACKED, WHOLE_KEYS)
    key_stride = heads * DK
    key_offset = (key_row * heads + head) * DK
    for k0 in range(0, DK, BLOCK_K):
        kc = k0 + columns
        la_part = log_decay_tile(log_alpha, i, kc, la_t, has_row, DK, PARTS)
        k_part = tile(k, i, kc, k_t, has_row, DK).to(tl.float32)
        q_part = tile(q, i, kc, q_t, has_row, DK).to(tl.float32)
        since = tl.exp(running_sums(la_part, i, PARTS))
        written = (k_part * since * strength[:, None]).to(dtype)
        nothing = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        written = tl.dot(x_out, written, nothing, input_precision=PRECISION)
        put(w + key_offset, i, kc, key_stride, has_row, DK, written)
        put(query_in + key_offset, i, kc, key_stride, has_row, DK, q_part * since * scale)
        until = decay_to_end(la_part, i, PARTS)
        put(key_out + key_offset, i, kc, key_stride, has_row, DK, k_part * until)

    value_row = scratch_row(batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES)
    value_offset = (value_row * heads + head) * DV
    value_columns = tl.arange(0, BLOCK_V)
    for v0 in range(0, DV, BLOCK_V):
        vc = v0 + value_columns
        written = (tile(v, i, vc, v_t, has_row, DV) * strength[:, None]).to(dtype)
        nothing = tl.zeros([CHUNK, BLOCK_V], dtype=tl.float32)
        written = tl.dot(x_out, written, nothing, input_precision=PRECISION)
        put(u + value_offset, i, vc, heads * DV, has_row, DV, written)
