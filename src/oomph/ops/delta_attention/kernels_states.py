# mypy: disable-error-code="no-untyped-def"
"""The state recurrences over chunks: one program per sequence, head and slice of the value channels.

Forward: v_new = u - w S, o = qg S + Aqk v_new, then S = decay * S + kg^T v_new (kernels_intra.py has the
symbols). Backward, from the last chunk to the first: dv_new = Aqk^T do + kg dS, then
dS = decay * dS + qg^T do - w^T dv_new. The state is float32 in registers; products take it in the dtype of k.
"""

import triton
import triton.language as tl

from oomph.ops.delta_attention.kernels_intra import chunk_bounds, load_tile, scratch_row, store_tile

# Triton would compile again for values that are 1 or multiples of 16.
NOT_SPECIALIZED = ["first_chunk", "chunks", "total_chunks", "tokens", "heads", "key_rows", "value_rows"]


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
