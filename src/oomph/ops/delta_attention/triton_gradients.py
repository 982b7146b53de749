# mypy: disable-error-code="no-untyped-def"
"""The gradients of a chunk's inputs, once the states and their gradients are known: two kernels.

With S the state before the chunk and y = v - (exp(g) k) S, r solves (I + diag(beta) A) r = diag(beta) y. So
with p = X^T dr: d(beta y) = p, and d(diag(beta) A) = -p r^T below the diagonal. The rest is the chain rule
through the products with decays, level by level as in the forward pass.

Two kernels, so that no program reads what it has written itself. In the second a slice of the keys is a
program: a loop over slices would keep the pointers of all its tiles in registers, which are short. No first
operand of a product is transposed in registers, which Triton 3.4 to 3.7.0 compile wrongly for Hopper; tiles
that are wanted both ways round are stored both ways round.
"""

import triton
import triton.language as tl

from oomph.ops.delta_attention.triton_blocks import (
    chunk_bounds,
    decay_to_end,
    decay_to_middle,
    exact_sums,
    log_decay_tile,
    pairs_of,
    put,
    running_sums,
    scratch_row,
    tile,
)

# Not compiled anew for values that are multiples of 16, or 1.
COUNTS = ["first_chunk", "chunks", "tokens", "heads", "value_rows", "beta_b", "beta_t", "beta_h"]


@triton.jit(do_not_specialize=COUNTS)
def value_gradients(
    v,
    beta,
    grad_o,
    r,
    grad_r,
    scores,
    inverse,
    grad_v,
    grad_beta,
    chunk_start,
    chunk_rows,
    scale,
    first_chunk,
    chunks,
    tokens,
    heads,
    value_rows,
    v_b,
    v_t,
    v_h,
    beta_b,
    beta_t,
    beta_h,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE_VALUES: tl.constexpr,
    GRAD_V: tl.constexpr,
    GRAD_BETA: tl.constexpr,
):
    """One program per chunk and head: dv, a share of dbeta, and p in place of dr.

    The gradients of scores and of diag(beta) A take the places of scores and of X, both ways round: above the
    diagonal is what is below it, so that nobody has to transpose. The diagonal itself is that of the scores.
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
    strength = tl.load(beta + i * beta_t, mask=has_row, other=0.0).to(tl.float32)
    token_head = (batch * tokens + start) * heads + head
    value_row = scratch_row(batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES)
    value_at = (value_row * heads + head) * DV
    value_stride = heads * DV
    tile_at = (batch_head * chunks + local) * CHUNK * CHUNK
    square = i[:, None] * CHUNK + i[None, :]
    x_t = tl.trans(tl.load(inverse + tile_at + square))

    grad_a = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    grad_s = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
    grad_strength = tl.zeros([CHUNK], dtype=tl.float32)
    for v0 in range(0, DV, BLOCK_V):
        vc = v0 + tl.arange(0, BLOCK_V)
        p = tl.dot(x_t, tile(grad_r + value_at, i, vc, value_stride, has_row, DV), input_precision=PRECISION)
        p_out = p.to(dtype)
        r_t = tl.trans(tile(r + value_at, i, vc, value_stride, has_row, DV))
        grad_a = tl.dot(p_out, r_t, grad_a, input_precision=PRECISION)
        grad_out = tile(grad_o + token_head * DV, i, vc, value_stride, has_row, DV).to(dtype)
        grad_s = tl.dot(grad_out, r_t, grad_s, input_precision=PRECISION)
        put(grad_r + value_at, i, vc, value_stride, has_row, DV, p_out)
        if GRAD_V:
            put(grad_v + token_head * DV, i, vc, value_stride, has_row, DV, p * strength[:, None])
        if GRAD_BETA:
            grad_strength += tl.sum(p * tile(v, i, vc, v_t, has_row, DV).to(tl.float32), axis=1)
    flipped = i[None, :] * CHUNK + i[:, None]
    below = i[:, None] > i[None, :]
    grad_a_out = (-grad_a).to(dtype)
    grad_s_out = (grad_s * scale).to(dtype)
    tl.store(inverse + tile_at + square, grad_a_out, mask=below)
    tl.store(inverse + tile_at + flipped, grad_a_out, mask=below)
    tl.store(scores + tile_at + square, grad_s_out, mask=i[:, None] >= i[None, :])
    tl.store(scores + tile_at + flipped, grad_s_out, mask=below)
    if GRAD_BETA:
        tl.store(grad_beta + token_head + i * heads, grad_strength, mask=has_row)


@triton.jit(do_not_specialize=[*COUNTS, "beta_share"])
def key_gradients(
    q,
    k,
    log_alpha,
    beta,
    grad_o,
    r,
    p,
    states,
    grad_states,
    scores,
    inverse,
    decay,
    narrow,
    grad_q,
    grad_k,
    grad_la,
    grad_beta,
    chunk_start,
    chunk_rows,
    scale,
    first_chunk,
    chunks,
    tokens,
    heads,
    value_rows,
    beta_share,
    q_b,
    q_t,
    q_h,
    k_b,
    k_t,
    k_h,
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
    GRADIENT_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE_VALUES: tl.constexpr,
    GRAD_Q: tl.constexpr,
    GRAD_K: tl.constexpr,
    GRAD_LA: tl.constexpr,
    GRAD_BETA: tl.constexpr,
    NARROW: tl.constexpr,
):
    """One program per chunk, head and slice of the keys' channels: dq, dk, the log-decays', a share of dbeta.

    Started twice, for narrow chunks and for the others; a program whose chunk is not its own ends at once.
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
    tile_at = batch_head * chunks + local
    if (tl.load(narrow + tile_at) == 1) != NARROW:
        return
    i = tl.arange(0, CHUNK)
    has_row = i < rows
    kc = part * BLOCK_K + tl.arange(0, BLOCK_K)
    dtype = k.dtype.element_ty
    token_head = (batch * tokens + start) * heads + head
    value_row = scratch_row(batch, start, first_chunk, chunk_start, value_rows, CHUNK, PACKED, WHOLE_VALUES)
    value_at = (value_row * heads + head) * DV
    value_stride = heads * DV

    gq = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    gk_later = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    gk_earlier = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
    along = tl.zeros([BLOCK_K], dtype=tl.float32)
    for v0 in range(0, DV, BLOCK_V):
        vc = v0 + tl.arange(0, BLOCK_V)
        in_state = tile_at * DK * DV + kc[None, :] * DV + vc[:, None]
        has_state = (kc < DK)[None, :] & (vc < DV)[:, None]
        state = tl.load(states + in_state, mask=has_state, other=0.0)
        grad_out = tile(grad_o + token_head * DV, i, vc, value_stride, has_row, DV).to(dtype)
        gq = tl.dot(grad_out, state, gq, input_precision=PRECISION)
        p_tile = tile(p + value_at, i, vc, value_stride, has_row, DV)
        gk_later = tl.dot(p_tile, state, gk_later, input_precision=PRECISION)
        grad_state = tl.load(grad_states + in_state, mask=has_state, other=0.0)
        r_tile = tile(r + value_at, i, vc, value_stride, has_row, DV)
        gk_earlier = tl.dot(r_tile, grad_state, gk_earlier, input_precision=PRECISION)
        along += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), axis=0)

    beta += batch * beta_b + start.to(tl.int64) * beta_t + head * beta_h
    strength = tl.load(beta + i * beta_t, mask=has_row, other=0.0).to(tl.float32)
    q += batch * q_b + start.to(tl.int64) * q_t + head * q_h
    k += batch * k_b + start.to(tl.int64) * k_t + head * k_h
    log_alpha += batch * la_b + start.to(tl.int64) * la_t + head * la_h
    la_tile = log_decay_tile(log_alpha, i, kc, la_t, has_row, DK, PARTS)
    k_tile = tile(k, i, kc, k_t, has_row, DK)
    q_tile = tile(q, i, kc, q_t, has_row, DK)
    sums_at = tile_at * 3 * DK
    total = tl.load(decay + sums_at + kc, mask=kc < DK, other=0.0)
    square = tile_at * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    if NARROW:
        first_half = tl.load(decay + sums_at + DK + kc, mask=kc < DK, other=0.0)
        second_half = tl.load(decay + sums_at + 2 * DK + kc, mask=kc < DK, other=0.0)
        distance = running_sums(la_tile, i, PARTS) - first_half[None, :]
        later = tl.exp(distance)
        earlier = tl.exp(-distance)
        gk_earlier = gk_earlier * tl.exp(second_half)[None, :]
        # The decay of the whole chunk is that of the state and of every key on its way out.
        grad_total = along * total + tl.sum(k_tile * gk_earlier * earlier, axis=0)
        to_middle = tl.exp(first_half)[None, :]
        k_earlier = (k_tile * earlier).to(dtype)
        q_later = (q_tile * later).to(dtype)
        k_later = (k_tile * later * strength[:, None]).to(dtype)
        below = i[:, None] > i[None, :]
        above = i[:, None] < i[None, :]
        s_tile = tl.load(scores + square)
        a_tile = tl.load(inverse + square)
        gq = gq * to_middle * scale
        gq = tl.dot(tl.where(below, s_tile, 0.0).to(dtype), k_earlier, gq, input_precision=PRECISION) * later
        gk_later = gk_later * -to_middle
        gk_later = tl.dot(
            tl.where(below, a_tile, 0.0).to(dtype), k_earlier, gk_later, input_precision=PRECISION
        )
        gk_later = gk_later * later
        gk_earlier = tl.dot(
            tl.where(above, s_tile, 0.0).to(dtype), q_later, gk_earlier, input_precision=PRECISION
        )
        gk_earlier = tl.dot(
            tl.where(above, a_tile, 0.0).to(dtype), k_later, gk_earlier, input_precision=PRECISION
        )
        gk_earlier = gk_earlier * earlier
    else:
        since = tl.exp(running_sums(la_tile, i, PARTS))
        gq = gq * since * scale
        gk_later = gk_later * -since
        gk_earlier = gk_earlier * decay_to_end(la_tile, i, PARTS)
        grad_total = along * total + tl.sum(k_tile * gk_earlier, axis=0)
        nothing = tl.zeros([CHUNK, BLOCK_K], dtype=tl.float32)
        for level in range(LEVELS):
            half = decay_to_middle(la_tile, i, level, PARTS)
            pairs = pairs_of(i[:, None], i[None, :], level)
            pairs_back = pairs_of(i[None, :], i[:, None], level)
            k_half = (k_tile * half).to(dtype)
            q_half = (q_tile * half).to(dtype)
            written = (k_tile * half * strength[:, None]).to(dtype)
            s_tile = tl.load(scores + square, mask=pairs, other=0.0)
            gq += half * tl.dot(s_tile, k_half, nothing, input_precision=PRECISION)
            a_tile = tl.load(inverse + square, mask=pairs, other=0.0)
            gk_later += half * tl.dot(a_tile, k_half, nothing, input_precision=PRECISION)
            s_tile = tl.load(scores + square, mask=pairs_back, other=0.0)
            a_tile = tl.load(inverse + square, mask=pairs_back, other=0.0)
            back = tl.dot(s_tile, q_half, nothing, input_precision=PRECISION)
            gk_earlier += half * tl.dot(a_tile, written, back, input_precision=PRECISION)
    if GRAD_BETA:
        grad_beta += (part + 1).to(tl.int64) * beta_share + token_head
        tl.store(grad_beta + i * heads, tl.sum(k_tile * gk_later, axis=1), mask=has_row)
    gk_later = gk_later * strength[:, None]
    if GRAD_LA:
        by_token = q_tile * gq + k_tile * (gk_later - gk_earlier)
        grad_decay = exact_sums(i[None, :] >= i[:, None], by_token, GRADIENT_PARTS) + grad_total[None, :]
        put(grad_la + token_head * DK, i, kc, heads * DK, has_row, DK, grad_decay)
    diagonal = tl.load(scores + tile_at * CHUNK * CHUNK + i * (CHUNK + 1)).to(tl.float32)
    if GRAD_Q:
        put(grad_q + token_head * DK, i, kc, heads * DK, has_row, DK, gq + k_tile * diagonal[:, None])
    if GRAD_K:
        gk = gk_later + gk_earlier + q_tile * diagonal[:, None]
        put(grad_k + token_head * DK, i, kc, heads * DK, has_row, DK, gk)
