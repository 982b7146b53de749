# mypy: disable-error-code="no-untyped-def"
"""The updates of compact optimizers, a parameter in one kernel: bound by what is read and written once.

A program takes ROWS blocks of BLOCK numbers, laid out as [ROWS, BLOCK]: one row, one scale of 8-bit state.
"""

import triton
import triton.language as tl


@triton.jit
def _neighbour(number, drawn):
    """A bfloat16 neighbour of a float32 number, up by the chance that its cut-off part is; NaN stays."""
    bits = number.to(tl.int32, bitcast=True)
    cut = ((bits + (drawn & 0xFFFF).to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    return tl.where(number == number, cut, number)


@triton.jit
def _code(scaled, edges_ptr):
    """How many of the 255 midpoints are smaller: a binary search, the same for every number."""
    code = tl.zeros(scaled.shape, dtype=tl.int32)
    for power in tl.static_range(8):
        edge = tl.load(edges_ptr + code + ((128 >> power) - 1))
        code += tl.where(scaled > edge, 128 >> power, 0)
    return code


@triton.jit
def _read(ptr, scale_ptr, table_ptr, at, inside, row, is_row, VALUES: tl.constexpr, CODED: tl.constexpr):
    if CODED:
        code = tl.load(ptr + at, mask=inside, other=0).to(tl.int32)
        scale = tl.load(scale_ptr + row, mask=is_row, other=0.0)
        return tl.load(table_ptr + VALUES + code) * scale[:, None]
    else:
        return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(
    number, ptr, scale_ptr, table_ptr, at, inside, row, is_row, drawn,
    EDGES: tl.constexpr, CODED: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    if CODED:
        # What lies outside counts as zero, so that it does not decide the last block's scale.
        number = tl.where(inside, number, 0.0)
        scale = tl.maximum(tl.max(tl.abs(number), axis=1), 1e-12)
        scale += tl.sum(number - number, axis=1)  # a maximum passes over NaN; it must not be lost
        tl.store(scale_ptr + row, scale, mask=is_row)
        tl.store(ptr + at, _code(number / scale[:, None], table_ptr + EDGES).to(tl.uint8), mask=inside)
    else:
        if DRAWN:
            number = _neighbour(number, drawn)
        tl.store(ptr + at, number.to(ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def adam(
    p_ptr, g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, table_ptr,
    new1, beta2, new2, size, root, eps, shrink, decay,
    N, seed,
    MAXIMIZE: tl.constexpr, CODED: tl.constexpr, DRAWN_STATE: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """m and v are the averages, new1 and new2 the shares of what is new in them (1 - beta, rounded once);
    `shrink` is AdamW's decay of p itself, `decay` Adam's, through g."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < N
    is_row = row * BLOCK < N
    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = _read(m_ptr, m_scale_ptr, table_ptr, at, inside, row, is_row, 0, CODED)
    v = _read(v_ptr, v_scale_ptr, table_ptr, at, inside, row, is_row, 256, CODED)
    if CODED:  # of v, the root is kept
        v *= v
    if MAXIMIZE:
        g = -g
    p *= shrink
    g += decay * p
    m += new1 * (g - m)
    v = beta2 * v + new2 * g * g
    root_v = tl.sqrt(v)
    p -= size * m / (root_v / root + eps)
    if STOCHASTIC or DRAWN_STATE:
        first, second, third, _ = tl.randint4x(seed, at.to(tl.uint32))
    else:
        first, second, third = tl.zeros_like(p), tl.zeros_like(p), tl.zeros_like(p)
    _write(m, m_ptr, m_scale_ptr, table_ptr, at, inside, row, is_row, first, 512, CODED, DRAWN_STATE)
    if CODED:
        v = root_v
    _write(v, v_ptr, v_scale_ptr, table_ptr, at, inside, row, is_row, second, 768, CODED, DRAWN_STATE)
    if STOCHASTIC:
        p = _neighbour(p, third)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def sgd(
    p_ptr, g_ptr, m_ptr, lr, momentum, taken, decay,
    N, seed,
    MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DRAWN_STATE: tl.constexpr,
    STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`taken`: the share of the gradient that enters the momentum m."""
    at = tl.program_id(0).to(tl.int64) * (ROWS * BLOCK) + tl.arange(0, ROWS * BLOCK)
    inside = at < N
    p = tl.load(p_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    g += decay * p
    if STOCHASTIC or DRAWN_STATE:
        first, second, _, _ = tl.randint4x(seed, at.to(tl.uint32))
    if MOMENTUM:
        m = momentum * tl.load(m_ptr + at, mask=inside, other=0.0).to(tl.float32) + taken * g
        g = g + momentum * m if NESTEROV else m
        if DRAWN_STATE:
            m = _neighbour(m, first)
        tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=inside)
    p -= lr * g
    if STOCHASTIC:
        p = _neighbour(p, second)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=inside)
