# mypy: disable-error-code="no-untyped-def"
"""The recurrences over chunks: one program per sequence, head and slice of the values' channels.

Forward: r = u - w S, o = query_in S + scores r, then S = decay * S + key_out^T r. Backward, from the last
chunk to the first: dr = scores^T do + key_out dS, then dS = decay * dS + query_in^T do - w^T dr. The state
is float32 in registers; the products take it in the dtype of the keys.
"""

import triton
import triton.language as tl

from oomph.ops.delta_attention.triton_blocks import chunk_bounds, put, scratch_row, tile

# Not compiled anew for values that are multiples of 16, or 1.
COUNTS = ["first_chunk", "chunks", "all_chunks", "tokens", "heads", "key_rows", "value_rows"]


@triton.jit
def own_chunks(sequence, sequence_chunk, first_chunk, chunks, all_chunks, PACKED: tl.constexpr):
    """A sequence's chunks, and which of them lie in this segment."""
    if PACKED:
        begin = tl.load(sequence_chunk + sequence).to(tl.int32)
        end = tl.load(sequence_chunk + sequence + 1).to(tl.int32)
    else:
        begin = 0
        end = all_chunks
    return begin, end, tl.maximum(begin, first_chunk), tl.minimum(end, first_chunk + chunks)


@triton.jit(do_not_specialize=COUNTS)
def forward_states(
    w,
    key_out,
    query_in,
    u,
    scores,
    decay,
    o,
    states,
    initial,
    state_before,
    state_after,
    final,
    chunk_start,
    chunk_rows,
    sequence_chunk,
    first_chunk,
    chunks,
    all_chunks,
    tokens,
    heads,
    key_rows,
    value_rows,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE_KEYS: tl.constexpr,
    WHOLE_VALUES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    OUTPUT: tl.constexpr,
):
    """OUTPUT: writes o and the states between segments. Else r, in place of u, and the chunks' states."""
    program = tl.program_id(0)
    slices: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    sequence_head = (program // slices).to(tl.int64)
    sequence = sequence_head // heads
    head = sequence_head % heads
    begin, end, first, last = own_chunks(sequence, sequence_chunk, first_chunk, chunks, all_chunks, PACKED)
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
        tile_at = batch_head * chunks + (chunk - first_chunk)
        w_tile = tile(w + key_offset, i, kc, heads * DK, has_row, DK)
        k_tile = tile(key_out + key_offset, i, kc, heads * DK, has_row, DK)
        rounded = state.to(dtype)
        r = tile(u + value_offset, i, vc, heads * DV, has_row, DV).to(tl.float32)
        r -= tl.dot(w_tile, rounded, input_precision=PRECISION)
        r_out = r.to(dtype)
        if OUTPUT:
            q_tile = tile(query_in + key_offset, i, kc, heads * DK, has_row, DK)
            score = tl.load(scores + tile_at * CHUNK * CHUNK + square)
            out = tl.dot(q_tile, rounded, input_precision=PRECISION)
            out = tl.dot(score, r_out, out, input_precision=PRECISION)
            put(o + ((batch * tokens + start) * heads + head) * DV, i, vc, heads * DV, has_row, DV, out)
        else:
            put(u + value_offset, i, vc, heads * DV, has_row, DV, r_out)
            tl.store(states + tile_at * DK * DV + in_state, rounded, mask=has_state)
        factor = tl.load(decay + 3 * tile_at * DK + kc, mask=kc < DK, other=0.0)
        state = state * factor[:, None]
        state = tl.dot(tl.trans(k_tile), r_out, state, input_precision=PRECISION)
    if OUTPUT:
        tl.store(final + own_state, state, mask=has_state & (last == end))
        tl.store(state_after + carried_state, state, mask=has_state & (last < end))


@triton.jit(do_not_specialize=COUNTS)
def backward_states(
    w,
    key_out,
    query_in,
    scores,
    decay,
    grad_o,
    grad_r,
    grad_states,
    grad_initial,
    grad_before,
    grad_after,
    grad_final,
    chunk_start,
    chunk_rows,
    sequence_chunk,
    first_chunk,
    chunks,
    all_chunks,
    tokens,
    heads,
    key_rows,
    value_rows,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE_KEYS: tl.constexpr,
    WHOLE_VALUES: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
):
    """Writes dr, and for each chunk the gradient of the state that leaves it."""
    program = tl.program_id(0)
    slices: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V
    sequence_head = (program // slices).to(tl.int64)
    sequence = sequence_head // heads
    head = sequence_head % heads
    begin, end, first, last = own_chunks(sequence, sequence_chunk, first_chunk, chunks, all_chunks, PACKED)
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
        tile_at = batch_head * chunks + (chunk - first_chunk)
        rounded = grad.to(dtype)
        tl.store(grad_states + tile_at * DK * DV + in_state, rounded, mask=has_state)
        k_tile = tile(key_out + key_offset, i, kc, heads * DK, has_row, DK)
        q_tile = tile(query_in + key_offset, i, kc, heads * DK, has_row, DK)
        w_tile = tile(w + key_offset, i, kc, heads * DK, has_row, DK)
        score = tl.load(scores + tile_at * CHUNK * CHUNK + square)
        grad_out = tile(
            grad_o + ((batch * tokens + start) * heads + head) * DV, i, vc, heads * DV, has_row, DV
        )
        grad_out = grad_out.to(dtype)
        grad_row = tl.dot(tl.trans(score), grad_out, input_precision=PRECISION)
        grad_row = tl.dot(k_tile, rounded, grad_row, input_precision=PRECISION)
        grad_row_out = grad_row.to(dtype)
        put(grad_r + value_offset, i, vc, heads * DV, has_row, DV, grad_row_out)
        factor = tl.load(decay + 3 * tile_at * DK + kc, mask=kc < DK, other=0.0)
        grad = grad * factor[:, None]
        grad = tl.dot(tl.trans(q_tile), grad_out, grad, input_precision=PRECISION)
        grad -= tl.dot(tl.trans(w_tile), grad_row_out, input_precision=PRECISION)
    tl.store(grad_before + carried_state, grad, mask=has_state & (first > begin))
    if HAS_INITIAL:
        tl.store(grad_initial + own_state, grad, mask=has_state & (first == begin))
