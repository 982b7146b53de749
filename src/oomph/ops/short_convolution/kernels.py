# mypy: disable-error-code="no-untyped-def,assignment"
"""Triton kernels of the short convolution. A program has SIZE channels (a whole unit) of a range of tokens.

Legend: T tokens, C channels, T + TAPS - 1 rows of x: tap j of token t reads row t + j. Neighbouring tiles
read a few rows of each other, from the cache.
"""

import triton
import triton.language as tl


@triton.jit
def _weighted_sum(x_at, w_at, rows, x_t, live, inside, TAPS: tl.constexpr):
    """The sums over taps, before SiLU, of tokens `rows`; 0 where not live."""
    total = tl.load(x_at + rows * x_t, mask=live, other=0.0).to(tl.float32)
    total *= tl.load(w_at, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TAPS):
        x = tl.load(x_at + (rows + j) * x_t, mask=live, other=0.0).to(tl.float32)
        total += x * tl.load(w_at + j, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def convolution_forward(
    x_ptr, w_ptr, y_ptr, T, C,
    x_b, x_t,
    TAPS: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """y [B, T, C] = silu(conv(x)), and scaled to length 1 where UNIT."""
    blocks = tl.cdiv(T, BLOCK_T)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    rows = ((tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    index = tl.arange(0, BLOCK_C)[None, :]
    columns = tl.program_id(1) * SIZE + index
    inside = (index < SIZE) & (columns < C)
    live = (rows < T) & inside
    z = _weighted_sum(x_ptr + b * x_b + columns, w_ptr + columns * TAPS, rows, x_t, live, inside, TAPS)
    y = z * tl.sigmoid(z)
    if UNIT:
        y *= tl.rsqrt(tl.sum(y * y, axis=1) + EPSILON)[:, None]
    tl.store(y_ptr + (b * T + rows) * C + columns, y, mask=live)


@triton.jit
def convolution_backward(
    x_ptr, w_ptr, grad_ptr, grad_x_ptr, partial_ptr, T, C,
    x_b, x_t, grad_b, grad_t,
    TAPS: tl.constexpr, ROUNDS: tl.constexpr, SIZE: tl.constexpr, UNIT: tl.constexpr, EPSILON: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """grad_x [B, T + TAPS - 1, C], and partial [programs, TAPS, C] of the weight's gradient.

    Row r of x is read by the tokens r, r - 1, ..., r - TAPS + 1. Their gradients are recomputed for each row
    that they read, rather than exchanged between programs.
    """
    R = T + TAPS - 1
    blocks = tl.cdiv(R, BLOCK_T * ROUNDS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    first = (tl.program_id(0) % blocks) * BLOCK_T * ROUNDS
    index = tl.arange(0, BLOCK_C)[None, :]
    columns = tl.program_id(1) * SIZE + index
    inside = (index < SIZE) & (columns < C)
    x_at, w_at = x_ptr + b * x_b + columns, w_ptr + columns * TAPS
    sums = ()
    for _ in tl.static_range(TAPS):
        sums = sums + (tl.zeros((BLOCK_C,), tl.float32),)  # noqa: RUF005
    for turn in range(ROUNDS):
        rows = (first + turn * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        grad_x = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for back in tl.static_range(TAPS):
            tokens = rows - back
            live = (tokens >= 0) & (tokens < T) & inside
            z = _weighted_sum(x_at, w_at, tokens, x_t, live, inside, TAPS)
            s = tl.sigmoid(z)
            g = tl.load(grad_ptr + b * grad_b + tokens * grad_t + columns, mask=live, other=0.0).to(
                tl.float32
            )
            if UNIT:
                y = z * s
                scale = tl.rsqrt(tl.sum(y * y, axis=1) + EPSILON)[:, None]
                y *= scale
                g = scale * (g - y * tl.sum(y * g, axis=1)[:, None])
            g *= s * (1 + z * (1 - s))
            grad_x += g * tl.load(w_at + back, mask=inside, other=0.0).to(tl.float32)
            if back == 0:
                new = ()
                for j in tl.static_range(TAPS):
                    x = tl.load(x_at + (tokens + j) * x_t, mask=live, other=0.0).to(tl.float32)
                    new = new + (sums[j] + tl.sum(g * x, axis=0),)  # noqa: RUF005
                sums = new
        tl.store(grad_x_ptr + (b * R + rows) * C + columns, grad_x, mask=(rows < R) & inside)
    flat = tl.program_id(1) * SIZE + tl.arange(0, BLOCK_C)
    owned = (tl.arange(0, BLOCK_C) < SIZE) & (flat < C)
    for j in tl.static_range(TAPS):
        tl.store(partial_ptr + (tl.program_id(0).to(tl.int64) * TAPS + j) * C + flat, sums[j], mask=owned)
