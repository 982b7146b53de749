# mypy: disable-error-code="no-untyped-def, assignment, var-annotated"
"""The kernels of the scan. Each program has one row of the batch, one block of channels and one segment of
tokens, walks over the tokens with the states h [BD, N] in registers, and does so for one direction after the
other: so the second can add to what the first wrote, and no sum over directions is left to make.

Legend: b row of the batch, t token, d channel, n state number, K tokens of a chunk, S tokens taken at a time.
`left` is 1 where the tokens are visited from the last to the first. Tokens beyond the end count as delta = 0,
which leaves a state as it is.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(v):
    """max(v, 0) + log(1 + e) with e = exp(-|v|), to the last digits also where e is small.

    log(1 + e) = 2 atanh(s) with s = e / (2 + e) <= 1/3, as a series: the threads that share a channel all
    compute this, and it is several times cheaper than a logarithm that is exact near 1.
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
def used_delta(raw, bias, mask, SOFTPLUS: tl.constexpr):
    """delta as the scan uses it: with its bias, positive, and 0 outside."""
    raw = raw.to(tl.float32) + bias
    delta = softplus(raw) if SOFTPLUS else raw
    return tl.where(mask, delta, 0.0)


@triton.jit
def read(place, mask):
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def read_channels(pointer, way, d, channels, inside):
    """A row of [R, d], or zeros where the tensor was not given."""
    if pointer is not None:
        row = read(pointer + way * d + channels, inside)
    else:
        row = tl.zeros(channels.shape, dtype=tl.float32)
    return row


# A new batch size, length or cut into segments must not mean a new compilation.
SIZES = ["batch", "length", "segments", "segment_chunks", "segment_tokens"]


@triton.jit(do_not_specialize=SIZES)
def scan_forward(
    y_ptr,
    x_ptr,
    delta_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    bias_ptr,
    entry_ptr,  # [R, segments, b, d, n]
    kept_ptr,  # [R, b, chunks, d, n]
    final_ptr,  # [R, b, d, n]
    x_R,
    x_b,
    x_t,
    x_d,
    delta_R,
    delta_b,
    delta_t,
    delta_d,
    B_R,
    B_b,
    B_t,
    B_n,
    C_R,
    C_b,
    C_t,
    C_n,
    z_b,
    z_t,
    z_d,
    batch,
    length,
    d,
    n,
    segments,
    segment_chunks,
    WAYS: tl.constexpr,
    LEFTWARD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    BD: tl.constexpr,
    N: tl.constexpr,
):
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    segment = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = program % blocks * BD + tl.arange(0, BD)
    numbers = tl.arange(0, N)
    is_channel, is_number = channels < d, numbers < n
    is_state = is_channel[:, None] & is_number[None, :]
    state = channels[:, None] * n + numbers[None, :]
    chunks = tl.cdiv(length, K)
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)

    for way in range(WAYS):
        left = 1 if LEFTWARD else way
        A = read(A_ptr + way * d * n + state, is_state) * LOG2_E
        D = read_channels(D_ptr, way, d, channels, is_channel)
        bias = read_channels(bias_ptr, way, d, channels, is_channel)
        if entry_ptr is not None:
            h = read(entry_ptr + ((way * segments + segment) * batch + b) * d * n + state, is_state)
        else:
            h = tl.zeros((BD, N), dtype=tl.float32)
        for i in range(count):
            chunk = first + i + left * (count - 1 - 2 * i)
            if kept_ptr is not None:
                tl.store(kept_ptr + ((way * batch + b) * chunks + chunk) * d * n + state, h, mask=is_state)
            start = chunk * K
            tokens = tl.minimum(K, length - start)
            for j in range(0, tokens, S):
                # All loads before the first store, behind which the compiler would not move them.
                xs, deltas, Bs, Cs = (), (), (), ()
                for s in tl.static_range(S):
                    p = j + s
                    t = (start + p + left * (tokens - 1 - 2 * p)).to(tl.int64)
                    here, there = is_channel & (p < tokens), is_number & (p < tokens)
                    xs += (tl.load(x_ptr + way * x_R + b * x_b + t * x_t + channels * x_d, here, other=0.0),)
                    place = delta_ptr + way * delta_R + b * delta_b + t * delta_t + channels * delta_d
                    deltas += (tl.load(place, here, other=0.0),)
                    Bs += (tl.load(B_ptr + way * B_R + b * B_b + t * B_t + numbers * B_n, there, other=0.0),)
                    Cs += (tl.load(C_ptr + way * C_R + b * C_b + t * C_t + numbers * C_n, there, other=0.0),)
                for s in tl.static_range(S):
                    p = j + s
                    t = (start + p + left * (tokens - 1 - 2 * p)).to(tl.int64)
                    here = is_channel & (p < tokens)
                    x = xs[s].to(tl.float32)
                    delta = used_delta(deltas[s], bias, here, SOFTPLUS)
                    write = (delta * x)[:, None] * Bs[s].to(tl.float32)[None, :]
                    h = tl.exp2(delta[:, None] * A) * h + write
                    y = tl.sum(h * Cs[s].to(tl.float32)[None, :], axis=1) + D * x
                    place = y_ptr + (b * length + t) * d + channels
                    if WAYS > 1:
                        y += read(place, here & (way > 0))
                    if z_ptr is not None:  # noqa: SIM102 (known when compiled, the next is not)
                        if way == WAYS - 1:
                            z = read(z_ptr + b * z_b + t * z_t + channels * z_d, here)
                            y *= z * sigmoid(z)
                    tl.store(place, y, mask=here)
        if final_ptr is not None:  # noqa: SIM102
            if segment == (1 - left) * (segments - 1):
                tl.store(final_ptr + (way * batch + b) * d * n + state, h, mask=is_state)
        if WAYS > 1:
            tl.debug_barrier()  # the other direction reads y, maybe in other threads


@triton.jit(do_not_specialize=SIZES)
def scan_backward(
    g_ptr,
    x_ptr,
    delta_ptr,
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    z_ptr,
    bias_ptr,
    entry_ptr,  # of the gradient: [R, segments, b, d, n]
    kept_ptr,  # [R, b, chunks, d, n]
    spare_ptr,  # [programs, K / S, BD, N]
    dx_ptr,
    ddelta_ptr,
    dA_ptr,  # [R, segments, b, d, n]
    dB_ptr,  # [R, blocks of channels, b, t, n]
    dC_ptr,
    dD_ptr,  # [R, segments, b, d]
    dz_ptr,
    dbias_ptr,  # [R, segments, b, d]
    dinitial_ptr,  # [R, b, d, n]
    g_b,
    g_t,
    g_d,
    x_R,
    x_b,
    x_t,
    x_d,
    delta_R,
    delta_b,
    delta_t,
    delta_d,
    B_R,
    B_b,
    B_t,
    B_n,
    C_R,
    C_b,
    C_t,
    C_n,
    z_b,
    z_t,
    z_d,
    batch,
    length,
    d,
    n,
    segments,
    segment_chunks,
    WAYS: tl.constexpr,
    LEFTWARD: tl.constexpr,
    SHARED_X: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    BD: tl.constexpr,
    N: tl.constexpr,
):
    """A chunk at a time, in the order opposite to the scan's. Within a chunk the states are made again from
    the one kept at its entry, first to leave one for every S tokens in `spare`, then all S of them."""
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    block = program % blocks
    segment = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = block * BD + tl.arange(0, BD)
    numbers = tl.arange(0, N)
    is_channel, is_number = channels < d, numbers < n
    is_state = is_channel[:, None] & is_number[None, :]
    state = channels[:, None] * n + numbers[None, :]
    chunks = tl.cdiv(length, K)
    first = segment * segment_chunks
    count = tl.minimum(segment_chunks, chunks - first)
    spare = spare_ptr + program.to(tl.int64) * (K // S * BD * N)
    spare += tl.arange(0, BD)[:, None] * N + numbers[None, :]

    for way in range(WAYS):
        left = 1 if LEFTWARD else way
        x_row = x_ptr + way * x_R + b * x_b + channels * x_d
        delta_row = delta_ptr + way * delta_R + b * delta_b + channels * delta_d
        B_row = B_ptr + way * B_R + b * B_b + numbers * B_n
        C_row = C_ptr + way * C_R + b * C_b + numbers * C_n
        A = read(A_ptr + way * d * n + state, is_state)
        A2 = A * LOG2_E
        D = read_channels(D_ptr, way, d, channels, is_channel)
        bias = read_channels(bias_ptr, way, d, channels, is_channel)
        if entry_ptr is not None:
            dh = read(entry_ptr + ((way * segments + segment) * batch + b) * d * n + state, is_state)
        else:
            dh = tl.zeros((BD, N), dtype=tl.float32)
        dA = tl.zeros((BD, N), dtype=tl.float32)
        dD = tl.zeros((BD,), dtype=tl.float32)
        dbias = tl.zeros((BD,), dtype=tl.float32)
        for i in range(count):
            chunk = first + (count - 1 - i) + left * (2 * i + 1 - count)
            start = chunk * K
            tokens = tl.minimum(K, length - start)
            rounds = tl.cdiv(tokens, S)
            h = read(kept_ptr + ((way * batch + b) * chunks + chunk) * d * n + state, is_state)
            tl.debug_barrier()  # what the last chunk left in spare has been read
            for j in range(rounds - 1):
                tl.store(spare + j * (BD * N), h)
                for s in tl.static_range(S):
                    p = j * S + s
                    t = (start + p + left * (tokens - 1 - 2 * p)).to(tl.int64)
                    delta = used_delta(read(delta_row + t * delta_t, is_channel), bias, is_channel, SOFTPLUS)
                    x = read(x_row + t * x_t, is_channel)
                    B = read(B_row + t * B_t, is_number)
                    h = tl.exp2(delta[:, None] * A2) * h + (delta * x)[:, None] * B[None, :]
            tl.debug_barrier()
            for i_round in range(rounds):
                j = rounds - 1 - i_round
                before, deltas = (), ()
                for s in tl.static_range(S):
                    p = j * S + s
                    t = (start + p + left * (tokens - 1 - 2 * p)).to(tl.int64)
                    here, there = is_channel & (p < tokens), is_number & (p < tokens)
                    delta = used_delta(read(delta_row + t * delta_t, here), bias, here, SOFTPLUS)
                    before += (h,)
                    deltas += (delta,)
                    if s < S - 1:
                        x = read(x_row + t * x_t, here)
                        B = read(B_row + t * B_t, there)
                        h = tl.exp2(delta[:, None] * A2) * h + (delta * x)[:, None] * B[None, :]
                for back in tl.static_range(S):
                    p = j * S + S - 1 - back
                    t = (start + p + left * (tokens - 1 - 2 * p)).to(tl.int64)
                    here, there = is_channel & (p < tokens), is_number & (p < tokens)
                    delta = deltas[S - 1 - back]
                    x = read(x_row + t * x_t, here)
                    B = read(B_row + t * B_t, there)
                    C = read(C_row + t * C_t, there)
                    g = read(g_ptr + b * g_b + t * g_t + channels * g_d, here)
                    a = tl.exp2(delta[:, None] * A2)
                    decayed = a * before[S - 1 - back]
                    h_now = decayed + (delta * x)[:, None] * B[None, :]
                    row = (b * length + t) * d + channels
                    way_row = ((way * batch + b) * length + t) * d + channels
                    if z_ptr is not None:
                        z = read(z_ptr + b * z_b + t * z_t + channels * z_d, here)
                        sigma = sigmoid(z)
                        if dz_ptr is not None:
                            y = tl.sum(h_now * C[None, :], axis=1) + D * x
                            dz = g * sigma * (1.0 + z * (1.0 - sigma)) * y
                            if WAYS > 1:
                                dz += read(dz_ptr + row, here & (way > 0))
                            tl.store(dz_ptr + row, dz, mask=here)
                        g *= z * sigma
                    small_row = (((way * blocks + block) * batch + b) * length + t) * n + numbers
                    if dC_ptr is not None:
                        tl.store(dC_ptr + small_row, tl.sum(g[:, None] * h_now, axis=0), mask=there)
                    dh += g[:, None] * C[None, :]
                    if dB_ptr is not None:
                        tl.store(dB_ptr + small_row, tl.sum((delta * x)[:, None] * dh, axis=0), mask=there)
                    dh_B = tl.sum(dh * B[None, :], axis=1)
                    w = dh * decayed
                    if dx_ptr is not None:
                        dx = delta * dh_B + D * g
                        if SHARED_X:
                            if WAYS > 1:
                                dx += read(dx_ptr + row, here & (way > 0))
                            tl.store(dx_ptr + row, dx, mask=here)
                        else:
                            tl.store(dx_ptr + way_row, dx, mask=here)
                    if ddelta_ptr is not None:
                        ddelta = x * dh_B + tl.sum(w * A, axis=1)
                        if SOFTPLUS:
                            ddelta *= sigmoid(read(delta_row + t * delta_t, here) + bias)
                        if dbias_ptr is not None:
                            dbias += tl.where(here, ddelta, 0.0)
                        tl.store(ddelta_ptr + way_row, ddelta, mask=here)
                    if dA_ptr is not None:
                        dA += delta[:, None] * w
                    if dD_ptr is not None:
                        dD += g * x
                    dh *= a
                # For the next round, the one before this in the scan's order.
                h = tl.load(spare + (j - 1) * (BD * N), mask=is_state & (j > 0), other=0.0)
        sums = (way * segments + segment) * batch + b
        if dA_ptr is not None:
            tl.store(dA_ptr + sums * d * n + state, dA, mask=is_state)
        if dD_ptr is not None:
            tl.store(dD_ptr + sums * d + channels, dD, mask=is_channel)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + sums * d + channels, dbias, mask=is_channel)
        if dinitial_ptr is not None:  # noqa: SIM102
            if segment == left * (segments - 1):
                tl.store(dinitial_ptr + (way * batch + b) * d * n + state, dh, mask=is_state)
        if WAYS > 1:
            tl.debug_barrier()  # the other direction reads dx and dz, maybe in other threads
