# mypy: disable-error-code="assignment, var-annotated"
"""Triton kernels of the selective scan.

A program has one batch row, one block of channels and one segment of tokens. It walks over the tokens with
the states h [BD, N] in registers, one direction after the other: the second direction adds to the first's
result, so no sum over directions remains.

b batch row, t token, d channel, n state index, r direction, K tokens per chunk, S tokens loaded at a time.
`reverse` is 1 where the scan runs from the last token to the first. Tokens beyond the end have delta = 0,
which leaves a state unchanged.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(v):
    """max(v, 0) + log(1 + e) with e = exp(-|v|), accurate where e is small.

    log(1 + e) = 2 atanh(s) with s = e / (2 + e) <= 1/3, as a series: every thread of a channel
    computes it, and it is several times cheaper than a log1p.
    """
    e = tl.exp(-tl.abs(v))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 11 + q * (1.0 / 13 + q * (1.0 / 15))
    series = 1.0 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q * (1.0 / 9 + q * series))))
    return tl.where(v > 0.0, v, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def step_size(raw, bias, mask, SOFTPLUS: tl.constexpr):
    """delta with its bias and softplus; 0 outside the mask."""
    raw = raw.to(tl.float32) + bias
    delta = softplus(raw) if SOFTPLUS else raw
    return tl.where(mask, delta, 0.0)


@triton.jit
def load_fp32(address, mask):
    return tl.load(address, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_channels(pointer, r, d, channels, inside):
    """A row of [R, d], or zeros where the tensor was not given."""
    if pointer is not None:
        row = load_fp32(pointer + r * d + channels, inside)
    else:
        row = tl.zeros(channels.shape, dtype=tl.float32)
    return row


# A new batch size, length or number of segments must not recompile.
DYNAMIC_SIZES = ["batch", "length", "segments", "segment_chunks", "segment_tokens"]


@triton.jit(do_not_specialize=DYNAMIC_SIZES)
def scan_forward(
    y_ptr, x_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr,
    entry_ptr,  # [R, segments, b, d, n]
    states_ptr,  # [R, b, chunks, d, n]
    x_R, x_b, x_t, x_d, delta_R, delta_b, delta_t, delta_d,
    B_R, B_b, B_t, B_n, C_R, C_b, C_t, C_n, z_b, z_t, z_d,
    batch, length, d, n, segments, segment_chunks,
    DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, SOFTPLUS: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
    BD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    segment = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = program % blocks * BD + tl.arange(0, BD)
    ns = tl.arange(0, N)
    d_mask, n_mask = channels < d, ns < n
    state_mask = d_mask[:, None] & n_mask[None, :]
    state = channels[:, None] * n + ns[None, :]
    chunks = tl.cdiv(length, K)
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)

    for r in range(DIRECTIONS):
        reverse = 1 if REVERSE else r
        A = load_fp32(A_ptr + r * d * n + state, state_mask) * LOG2_E
        D = load_channels(D_ptr, r, d, channels, d_mask)
        bias = load_channels(bias_ptr, r, d, channels, d_mask)
        if entry_ptr is not None:
            h = load_fp32(entry_ptr + ((r * segments + segment) * batch + b) * d * n + state, state_mask)
        else:
            h = tl.zeros((BD, N), dtype=tl.float32)
        for i in range(count):
            chunk = first + i + reverse * (count - 1 - 2 * i)
            if states_ptr is not None:
                tl.store(states_ptr + ((r * batch + b) * chunks + chunk) * d * n + state, h, mask=state_mask)
            start = chunk * K
            tokens = tl.minimum(K, length - start)
            for j in range(0, tokens, S):
                # All loads before the first store: the compiler would not move them across it.
                xs, deltas, Bs, Cs = (), (), (), ()
                for s in tl.static_range(S):
                    p = j + s
                    t = (start + p + reverse * (tokens - 1 - 2 * p)).to(tl.int64)
                    d_inside, n_inside = d_mask & (p < tokens), n_mask & (p < tokens)
                    address = x_ptr + r * x_R + b * x_b + t * x_t + channels * x_d
                    xs += (tl.load(address, d_inside, other=0.0),)
                    address = delta_ptr + r * delta_R + b * delta_b + t * delta_t + channels * delta_d
                    deltas += (tl.load(address, d_inside, other=0.0),)
                    Bs += (tl.load(B_ptr + r * B_R + b * B_b + t * B_t + ns * B_n, n_inside, other=0.0),)
                    Cs += (tl.load(C_ptr + r * C_R + b * C_b + t * C_t + ns * C_n, n_inside, other=0.0),)
                for s in tl.static_range(S):
                    p = j + s
                    t = (start + p + reverse * (tokens - 1 - 2 * p)).to(tl.int64)
                    d_inside = d_mask & (p < tokens)
                    x = xs[s].to(tl.float32)
                    delta = step_size(deltas[s], bias, d_inside, SOFTPLUS)
                    write = (delta * x)[:, None] * Bs[s].to(tl.float32)[None, :]
                    h = tl.exp2(delta[:, None] * A) * h + write
                    y = tl.sum(h * Cs[s].to(tl.float32)[None, :], axis=1) + D * x
                    address = y_ptr + (b * length + t) * d + channels
                    if DIRECTIONS > 1:
                        y += load_fp32(address, d_inside & (r > 0))
                    if z_ptr is not None:  # noqa: SIM102 (a compile-time condition; the next is not)
                        if r == DIRECTIONS - 1:
                            z = load_fp32(z_ptr + b * z_b + t * z_t + channels * z_d, d_inside)
                            y *= z * sigmoid(z)
                    tl.store(address, y, mask=d_inside)
        if DIRECTIONS > 1:
            tl.debug_barrier()  # the other direction reads y, possibly in other threads


@triton.jit(do_not_specialize=DYNAMIC_SIZES)
def scan_backward(
    g_ptr, x_ptr, delta_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, bias_ptr,
    entry_ptr,  # of the gradient: [R, segments, b, d, n]
    states_ptr,  # [R, b, chunks, d, n]
    scratch_ptr,  # [programs, K / S, BD, N]
    dx_ptr, ddelta_ptr,
    dA_ptr,  # [R, segments, b, d, n]
    dB_ptr,  # [R, blocks of channels, b, t, n]
    dC_ptr,
    dD_ptr,  # [R, segments, b, d]
    dz_ptr,
    dbias_ptr,  # [R, segments, b, d]
    g_b, g_t, g_d,
    x_R, x_b, x_t, x_d, delta_R, delta_b, delta_t, delta_d,
    B_R, B_b, B_t, B_n, C_R, C_b, C_t, C_n, z_b, z_t, z_d,
    batch, length, d, n, segments, segment_chunks,
    DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, SHARED_X: tl.constexpr, SOFTPLUS: tl.constexpr,
    K: tl.constexpr, S: tl.constexpr, BD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Chunks in the opposite order of the scan. Within a chunk, states are recomputed from the one saved at
    its start: first one for every S tokens, into `scratch`, then all S of them."""
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    block = program % blocks
    segment = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = block * BD + tl.arange(0, BD)
    ns = tl.arange(0, N)
    d_mask, n_mask = channels < d, ns < n
    state_mask = d_mask[:, None] & n_mask[None, :]
    state = channels[:, None] * n + ns[None, :]
    chunks = tl.cdiv(length, K)
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)
    scratch = scratch_ptr + program.to(tl.int64) * (K // S * BD * N)
    scratch += tl.arange(0, BD)[:, None] * N + ns[None, :]

    for r in range(DIRECTIONS):
        reverse = 1 if REVERSE else r
        x_row = x_ptr + r * x_R + b * x_b + channels * x_d
        delta_row = delta_ptr + r * delta_R + b * delta_b + channels * delta_d
        B_row = B_ptr + r * B_R + b * B_b + ns * B_n
        C_row = C_ptr + r * C_R + b * C_b + ns * C_n
        A = load_fp32(A_ptr + r * d * n + state, state_mask)
        A2 = A * LOG2_E
        D = load_channels(D_ptr, r, d, channels, d_mask)
        bias = load_channels(bias_ptr, r, d, channels, d_mask)
        if entry_ptr is not None:
            dh = load_fp32(entry_ptr + ((r * segments + segment) * batch + b) * d * n + state, state_mask)
        else:
            dh = tl.zeros((BD, N), dtype=tl.float32)
        dA = tl.zeros((BD, N), dtype=tl.float32)
        dD = tl.zeros((BD,), dtype=tl.float32)
        dbias = tl.zeros((BD,), dtype=tl.float32)
        for i in range(count):
            chunk = first + (count - 1 - i) + reverse * (2 * i + 1 - count)
            start = chunk * K
            tokens = tl.minimum(K, length - start)
            rounds = tl.cdiv(tokens, S)
            h = load_fp32(states_ptr + ((r * batch + b) * chunks + chunk) * d * n + state, state_mask)
            tl.debug_barrier()  # the previous chunk's scratch has been read
            for j in range(rounds - 1):
                tl.store(scratch + j * (BD * N), h)
                for s in tl.static_range(S):
                    p = j * S + s
                    t = (start + p + reverse * (tokens - 1 - 2 * p)).to(tl.int64)
                    delta = step_size(load_fp32(delta_row + t * delta_t, d_mask), bias, d_mask, SOFTPLUS)
                    x = load_fp32(x_row + t * x_t, d_mask)
                    B = load_fp32(B_row + t * B_t, n_mask)
                    h = tl.exp2(delta[:, None] * A2) * h + (delta * x)[:, None] * B[None, :]
            tl.debug_barrier()
            for i_round in range(rounds):
                j = rounds - 1 - i_round
                before, deltas = (), ()
                for s in tl.static_range(S):
                    p = j * S + s
                    t = (start + p + reverse * (tokens - 1 - 2 * p)).to(tl.int64)
                    d_inside, n_inside = d_mask & (p < tokens), n_mask & (p < tokens)
                    delta = step_size(load_fp32(delta_row + t * delta_t, d_inside), bias, d_inside, SOFTPLUS)
                    before += (h,)
                    deltas += (delta,)
                    if s < S - 1:
                        x = load_fp32(x_row + t * x_t, d_inside)
                        B = load_fp32(B_row + t * B_t, n_inside)
                        h = tl.exp2(delta[:, None] * A2) * h + (delta * x)[:, None] * B[None, :]
                for back in tl.static_range(S):
                    p = j * S + S - 1 - back
                    t = (start + p + reverse * (tokens - 1 - 2 * p)).to(tl.int64)
                    d_inside, n_inside = d_mask & (p < tokens), n_mask & (p < tokens)
                    delta = deltas[S - 1 - back]
                    x = load_fp32(x_row + t * x_t, d_inside)
                    B = load_fp32(B_row + t * B_t, n_inside)
                    C = load_fp32(C_row + t * C_t, n_inside)
                    g = load_fp32(g_ptr + b * g_b + t * g_t + channels * g_d, d_inside)
                    a = tl.exp2(delta[:, None] * A2)
                    decayed = a * before[S - 1 - back]
                    h_now = decayed + (delta * x)[:, None] * B[None, :]
                    row = (b * length + t) * d + channels
                    r_row = ((r * batch + b) * length + t) * d + channels
                    if z_ptr is not None:
                        z = load_fp32(z_ptr + b * z_b + t * z_t + channels * z_d, d_inside)
                        sigma = sigmoid(z)
                        if dz_ptr is not None:
                            y = tl.sum(h_now * C[None, :], axis=1) + D * x
                            dz = g * sigma * (1.0 + z * (1.0 - sigma)) * y
                            if DIRECTIONS > 1:
                                dz += load_fp32(dz_ptr + row, d_inside & (r > 0))
                            tl.store(dz_ptr + row, dz, mask=d_inside)
                        g *= z * sigma
                    n_row = (((r * blocks + block) * batch + b) * length + t) * n + ns
                    if dC_ptr is not None:
                        tl.store(dC_ptr + n_row, tl.sum(g[:, None] * h_now, axis=0), mask=n_inside)
                    dh += g[:, None] * C[None, :]
                    if dB_ptr is not None:
                        tl.store(dB_ptr + n_row, tl.sum((delta * x)[:, None] * dh, axis=0), mask=n_inside)
                    dh_B = tl.sum(dh * B[None, :], axis=1)
                    w = dh * decayed
                    if dx_ptr is not None:
                        dx = delta * dh_B + D * g
                        if SHARED_X:
                            if DIRECTIONS > 1:
                                dx += load_fp32(dx_ptr + row, d_inside & (r > 0))
                            tl.store(dx_ptr + row, dx, mask=d_inside)
                        else:
                            tl.store(dx_ptr + r_row, dx, mask=d_inside)
                    if ddelta_ptr is not None:
                        ddelta = x * dh_B + tl.sum(w * A, axis=1)
                        if SOFTPLUS:
                            ddelta *= sigmoid(load_fp32(delta_row + t * delta_t, d_inside) + bias)
                        if dbias_ptr is not None:
                            dbias += tl.where(d_inside, ddelta, 0.0)
                        tl.store(ddelta_ptr + r_row, ddelta, mask=d_inside)
                    if dA_ptr is not None:
                        dA += delta[:, None] * w
                    if dD_ptr is not None:
                        dD += g * x
                    dh *= a
                # For the next round, which precedes this one in the scan's order.
                h = tl.load(scratch + (j - 1) * (BD * N), mask=state_mask & (j > 0), other=0.0)
        sums = (r * segments + segment) * batch + b
        if dA_ptr is not None:
            tl.store(dA_ptr + sums * d * n + state, dA, mask=state_mask)
        if dD_ptr is not None:
            tl.store(dD_ptr + sums * d + channels, dD, mask=d_mask)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + sums * d + channels, dbias, mask=d_mask)
        if DIRECTIONS > 1:
            tl.debug_barrier()  # the other direction reads dx and dz, possibly in other threads


@triton.jit(do_not_specialize=DYNAMIC_SIZES)
def segment_final_states(
    ends_ptr,  # [R, segments, b, d, n]
    sums_ptr,  # [R, segments, b, d]
    value_ptr, delta_ptr, A_ptr, vector_ptr, z_ptr, bias_ptr,
    value_R, value_b, value_t, value_d, delta_R, delta_b, delta_t, delta_d,
    vector_R, vector_b, vector_t, vector_n, z_b, z_t, z_d,
    batch, length, d, n, segments, segment_tokens,
    DIRECTIONS: tl.constexpr, REVERSE: tl.constexpr, GRADIENT: tl.constexpr, SOFTPLUS: tl.constexpr,
    BD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The final state of each segment for a zero initial state, and the sum of its deltas.

    Of the state h (value x, vector B); with GRADIENT of dh (value g and its gate z, vector C), for which the
    tokens are scanned in the opposite order.
    """
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    segment = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = program % blocks * BD + tl.arange(0, BD)
    ns = tl.arange(0, N)
    d_mask, n_mask = channels < d, ns < n
    state_mask = d_mask[:, None] & n_mask[None, :]
    state = channels[:, None] * n + ns[None, :]
    start = segment * segment_tokens
    tokens = tl.minimum(segment_tokens, length - start)
    for r in range(DIRECTIONS):
        reverse = 1 if REVERSE else r
        if GRADIENT:
            reverse = 1 - reverse
        A = load_fp32(A_ptr + r * d * n + state, state_mask) * LOG2_E
        bias = load_channels(bias_ptr, r, d, channels, d_mask)
        h = tl.zeros((BD, N), dtype=tl.float32)
        total = tl.zeros((BD,), dtype=tl.float32)
        for p in range(tokens):
            t = (start + p + reverse * (tokens - 1 - 2 * p)).to(tl.int64)
            address = delta_ptr + r * delta_R + b * delta_b + t * delta_t + channels * delta_d
            delta = step_size(load_fp32(address, d_mask), bias, d_mask, SOFTPLUS)
            address = value_ptr + r * value_R + b * value_b + t * value_t + channels * value_d
            value = load_fp32(address, d_mask)
            address = vector_ptr + r * vector_R + b * vector_b + t * vector_t + ns * vector_n
            vector = load_fp32(address, n_mask)
            a = tl.exp2(delta[:, None] * A)
            if GRADIENT:
                if z_ptr is not None:
                    z = load_fp32(z_ptr + b * z_b + t * z_t + channels * z_d, d_mask)
                    value *= z * sigmoid(z)
                h = a * (h + value[:, None] * vector[None, :])
            else:
                h = a * h + (delta * value)[:, None] * vector[None, :]
            total += delta
        sums = (r * segments + segment) * batch + b
        tl.store(ends_ptr + sums * d * n + state, h, mask=state_mask)
        tl.store(sums_ptr + sums * d + channels, total, mask=d_mask)


@triton.jit(do_not_specialize=DYNAMIC_SIZES)
def segment_initial_states(
    ends_ptr,  # [R, segments, b, d, n], in place
    sums_ptr,  # [R, segments, b, d]
    A_ptr, batch, d, n, segments,
    REVERSE: tl.constexpr, GRADIENT: tl.constexpr, BD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """From the final states for zero initial states to the initial state of each segment."""
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    r = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = program % blocks * BD + tl.arange(0, BD)
    ns = tl.arange(0, N)
    d_mask = channels < d
    state_mask = d_mask[:, None] & (ns < n)[None, :]
    state = channels[:, None] * n + ns[None, :]
    reverse = 1 if REVERSE else r
    if GRADIENT:
        reverse = 1 - reverse
    A = load_fp32(A_ptr + r * d * n + state, state_mask) * LOG2_E
    h = tl.zeros((BD, N), dtype=tl.float32)
    for i in range(segments):
        segment = i + reverse * (segments - 1 - 2 * i)
        row = (r * segments + segment) * batch + b
        end = load_fp32(ends_ptr + row * d * n + state, state_mask)
        total = load_fp32(sums_ptr + row * d + channels, d_mask)
        tl.store(ends_ptr + row * d * n + state, h, mask=state_mask)
        h = tl.exp2(total[:, None] * A) * h + end
