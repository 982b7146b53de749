# mypy: disable-error-code="no-untyped-def"
"""Gradients of a chunk's inputs, given the states before the chunks and the gradients of those after them.

With the symbols of kernels_intra.py, S the state before the chunk and y = beta (v - (exp(g) k) S) is
v_new = X y. So dy = X^T dv_new and d(diag(beta) Akk) = -dy v_new^T below the diagonal. The rest is the chain
rule through the products with decays, in bounded chunks at once and otherwise level by level, as in the
forward pass.

The gradient of g_i is q_i dq_i + k_i dk_i of k_i as a row of Akk, less k_i dk_i of k_i as a column of Akk and
Aqk, and that of log_alpha_i the sum of those from i on. A pair of tokens that are both in this sum appears in
it once as a row and once as a column, with opposite signs, and must cancel: both terms are computed from the
same rounded factors. With q and k in place of their rounded products with decays, what remains of these pairs
would be the larger part of the gradient's error in bfloat16.

There are two kernels, so that no program reads what it has stored itself. In the second a slice of the key
channels is a program: a loop over slices would hold the pointers of all its tiles in registers. No first
operand of a product is transposed in registers, which Triton 3.4 to 3.7.0 compile wrongly for Hopper; tiles
that are needed both ways are stored both ways.
"""

import triton
import triton.language as tl

from oomph.ops.delta_attention.kernels_intra import (
    chunk_bounds,
    cumulative_log_decay,
    decay_to_end,
    decay_to_middle,
    level_pairs,
    load_log_decay,
    load_tile,
    masked_token_sums,
    scratch_row,
    store_tile,
)

# Triton would compile again for values that are 1 or multiples of 16.
NOT_SPECIALIZED = ["first_chunk", "chunks", "tokens", "heads", "value_rows", "beta_b", "beta_t", "beta_h"]


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


@triton.jit(do_not_specialize=[*NOT_SPECIALIZED, "beta_share"])
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
