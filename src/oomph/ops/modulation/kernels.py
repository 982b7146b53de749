# mypy: disable-error-code="no-untyped-def"
"""The kernel of backward's two products with g: bound by the traffic of g, so it reads g once for both.

Legend: N tokens, F out, r the rank, R the rank padded for the tensor cores.
"""

import triton
import triton.language as tl


@triton.jit
def products_with_g(
    g_ptr,
    p_ptr,
    t_ptr,
    u_ptr,
    partial_ptr,
    N,
    r,
    g_row,
    p_f,
    p_r,
    F: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """u_Nr = g p, and partial_PFr = g^T t over each program's own rows.

    Program i of P takes the row blocks i, i + P, ... (ROUNDS of them) and adds them up in its own
    partial: no atomics, so the sum over programs that follows gives the same bits every time.
    """
    program = tl.program_id(0)
    ranks = tl.arange(0, R)
    is_rank = (ranks < r)[None, :]
    for turn in range(ROUNDS):
        rows = (turn * tl.num_programs(0) + program) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row = (rows < N)[:, None]
        rows = rows.to(tl.int64)[:, None]
        t = tl.load(t_ptr + rows * r + ranks[None, :], mask=is_row & is_rank, other=0.0)
        u = tl.zeros((BLOCK_N, R), dtype=tl.float32)
        for column in range(0, F, BLOCK_F):
            columns = column + tl.arange(0, BLOCK_F)
            is_column = columns < F
            g = tl.load(g_ptr + rows * g_row + columns[None, :], mask=is_row & is_column[None, :], other=0.0)
            inside = is_column[:, None] & is_rank
            columns = columns.to(tl.int64)[:, None]
            p = tl.load(p_ptr + columns * p_f + ranks[None, :] * p_r, mask=inside, other=0.0)
            u = tl.dot(g, p, u, input_precision=PRECISION)
            grad = tl.dot(tl.trans(g), t, input_precision=PRECISION)
            places = partial_ptr + program.to(tl.int64) * F * r + columns * r + ranks[None, :]
            if ROUNDS > 1:
                grad += tl.load(places, mask=inside & (turn > 0), other=0.0)
            tl.store(places, grad, mask=inside)
        tl.store(u_ptr + rows * r + ranks[None, :], u, mask=is_row & is_rank)
        if ROUNDS > 1:
            tl.debug_barrier()  # the next turn reads the partial that this one wrote, maybe in other threads
