# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel of low-bit Adam: it updates one parameter, and reads and writes once.

A program takes ROWS quantization blocks of BLOCK numbers, as [ROWS, BLOCK]; each row has one scale.
"""

import triton
import triton.language as tl


@triton.jit
def _round_stochastically(number, drawn):
    """Round float32 to one of the two nearest bfloat16 numbers, right on average; NaN stays NaN."""
    bits = number.to(tl.int32, bitcast=True)
    cut = ((bits + (drawn & 0xFFFF).to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(number == number, cut, number)


@triton.jit
def _quantize(scaled, midpoints_ptr):
    """The number of midpoints (of 255) that are smaller, by binary search."""
    code = tl.zeros(scaled.shape, dtype=tl.int32)
    for power in tl.static_range(8):
        midpoint = tl.load(midpoints_ptr + code + ((128 >> power) - 1))
        code += tl.where(scaled > midpoint, 128 >> power, 0)
    return code


@triton.jit
def _read(ptr, scale_ptr, table_ptr, at, inside, row, is_row, VALUES: tl.constexpr, QUANTIZED: tl.constexpr):
    if QUANTIZED:
        code = tl.load(ptr + at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scale_ptr + row, mask=is_row, other=0.0)
        return tl.load(table_ptr + VALUES + code) * scale[:, None]
    else:
        return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(
    number, ptr, scale_ptr, table_ptr, at, inside, row, is_row, drawn,
    MIDPOINTS: tl.constexpr, QUANTIZED: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    if QUANTIZED:
        # Numbers past the end must not affect the last block's scale.
        number = tl.where(inside, number, 0.0)
        scale = tl.maximum(tl.max(tl.abs(number), axis=1), 1e-12)
        scale += tl.sum(number - number, axis=1)  # tl.max ignores NaN, which must not be lost
        tl.store(scale_ptr + row, scale, mask=is_row)
        tl.store(
            ptr + at, _quantize(number / scale[:, None], table_ptr + MIDPOINTS).to(tl.uint8), mask=inside
        )
    else:
        if STOCHASTIC:
            number = _round_stochastically(number, drawn)
        tl.store(ptr + at, number.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def adam(
    p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, table_ptr,
    new1, beta2, new2, size, root, eps, shrink, decay,
    N, seed,
    MAXIMIZE: tl.constexpr, QUANTIZED: tl.constexpr, STOCHASTIC_STATE: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """m and v are exp_avg and exp_avg_sq; new1 and new2 are 1 - beta1 and 1 - beta2, rounded once. `shrink`
    multiplies p (AdamW's decoupled weight decay); `decay` is Adam's weight decay, added to g. `size` is
    lr / (1 - beta1**step), `root` is sqrt(1 - beta2**step)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < N
    is_row = row * BLOCK < N
    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = _read(m_ptr, m_scale_ptr, table_ptr, at, inside, row, is_row, 0, QUANTIZED)
    v = _read(v_ptr, v_scale_ptr, table_ptr, at, inside, row, is_row, 256, QUANTIZED)
    if QUANTIZED:  # the root of v is stored
        v *= v
    if MAXIMIZE:
        g = -g
    p *= shrink
    g += decay * p
    m += new1 * (g - m)
    v = beta2 * v + new2 * g * g
    root_v = tl.sqrt(v)
    p -= size * m / (root_v / root + eps)
    if STOCHASTIC or STOCHASTIC_STATE:
        first, second, third, _ = tl.randint4x(seed, at.to(tl.uint32))
    else:
        first, second, third = tl.zeros_like(p), tl.zeros_like(p), tl.zeros_like(p)
    _write(m, m_ptr, m_scale_ptr, table_ptr, at, inside, row, is_row, first, 512, QUANTIZED, STOCHASTIC_STATE)
    if QUANTIZED:
        v = root_v
    _write(
        v, v_ptr, v_scale_ptr, table_ptr, at, inside, row, is_row, second, 768, QUANTIZED, STOCHASTIC_STATE
    )
    if STOCHASTIC:
        p = _round_stochastically(p, third)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
