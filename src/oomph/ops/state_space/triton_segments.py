# mypy: disable-error-code="no-untyped-def"
"""The kernels that find what enters each segment of tokens, so that segments can run side by side.

Legend as in triton.py.
"""

import triton
import triton.language as tl

from oomph.ops.state_space.triton import LOG2_E, SIZES, read, read_channels, sigmoid, used_delta


@triton.jit(do_not_specialize=SIZES)
def segment_ends(
    ends_ptr,  # [R, segments, b, d, n]
    sums_ptr,  # [R, segments, b, d]
    value_ptr,
    delta_ptr,
    A_ptr,
    vector_ptr,
    z_ptr,
    bias_ptr,
    value_R,
    value_b,
    value_t,
    value_d,
    delta_R,
    delta_b,
    delta_t,
    delta_d,
    vector_R,
    vector_b,
    vector_t,
    vector_n,
    z_b,
    z_t,
    z_d,
    batch,
    length,
    d,
    n,
    segments,
    segment_tokens,
    WAYS: tl.constexpr,
    LEFTWARD: tl.constexpr,
    GRADIENT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BD: tl.constexpr,
    N: tl.constexpr,
):
    """What each segment leaves behind when nothing enters it, and the sum of its deltas.

    Of the state (value x, vector B) at the end of the visit; with GRADIENT of the state's gradient (value g
    and its gate z, vector C), for which tokens are visited in the opposite order.
    """
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    segment = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = program % blocks * BD + tl.arange(0, BD)
    numbers = tl.arange(0, N)
    is_channel, is_number = channels < d, numbers < n
    is_state = is_channel[:, None] & is_number[None, :]
    state = channels[:, None] * n + numbers[None, :]
    start = segment * segment_tokens
    tokens = tl.minimum(segment_tokens, length - start)
    for way in range(WAYS):
        left = 1 if LEFTWARD else way
        if GRADIENT:
            left = 1 - left
        A = read(A_ptr + way * d * n + state, is_state) * LOG2_E
        bias = read_channels(bias_ptr, way, d, channels, is_channel)
        h = tl.zeros((BD, N), dtype=tl.float32)
        total = tl.zeros((BD,), dtype=tl.float32)
        for p in range(tokens):
            t = (start + p + left * (tokens - 1 - 2 * p)).to(tl.int64)
            place = delta_ptr + way * delta_R + b * delta_b + t * delta_t + channels * delta_d
            delta = used_delta(read(place, is_channel), bias, is_channel, SOFTPLUS)
            place = value_ptr + way * value_R + b * value_b + t * value_t + channels * value_d
            value = read(place, is_channel)
            place = vector_ptr + way * vector_R + b * vector_b + t * vector_t + numbers * vector_n
            vector = read(place, is_number)
            a = tl.exp2(delta[:, None] * A)
            if GRADIENT:
                if z_ptr is not None:
                    z = read(z_ptr + b * z_b + t * z_t + channels * z_d, is_channel)
                    value *= z * sigmoid(z)
                h = a * (h + value[:, None] * vector[None, :])
            else:
                h = a * h + (delta * value)[:, None] * vector[None, :]
            total += delta
        sums = (way * segments + segment) * batch + b
        tl.store(ends_ptr + sums * d * n + state, h, mask=is_state)
        tl.store(sums_ptr + sums * d + channels, total, mask=is_channel)


@triton.jit(do_not_specialize=SIZES)
def link_segments(
    ends_ptr,  # [R, segments, b, d, n], in place
    sums_ptr,  # [R, segments, b, d]
    A_ptr,
    entry_ptr,  # [R, b, d, n]
    batch,
    d,
    n,
    segments,
    LEFTWARD: tl.constexpr,
    GRADIENT: tl.constexpr,
    BD: tl.constexpr,
    N: tl.constexpr,
):
    """From what each segment leaves when nothing enters it to what enters each."""
    blocks = tl.cdiv(d, BD)
    program = tl.program_id(0)
    way = program // blocks // batch
    b = (program // blocks % batch).to(tl.int64)
    channels = program % blocks * BD + tl.arange(0, BD)
    numbers = tl.arange(0, N)
    is_channel = channels < d
    is_state = is_channel[:, None] & (numbers < n)[None, :]
    state = channels[:, None] * n + numbers[None, :]
    left = 1 if LEFTWARD else way
    if GRADIENT:
        left = 1 - left
    A = read(A_ptr + way * d * n + state, is_state) * LOG2_E
    if entry_ptr is not None:
        h = read(entry_ptr + (way * batch + b) * d * n + state, is_state)
    else:
        h = tl.zeros((BD, N), dtype=tl.float32)
    for i in range(segments):
        segment = i + left * (segments - 1 - 2 * i)
        row = (way * segments + segment) * batch + b
        end = read(ends_ptr + row * d * n + state, is_state)
        total = read(sums_ptr + row * d + channels, is_channel)
        tl.store(ends_ptr + row * d * n + state, h, mask=is_state)
        h = tl.exp2(total[:, None] * A) * h + end
