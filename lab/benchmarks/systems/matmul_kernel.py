# mypy: disable-error-code="no-untyped-def"
"""A matrix product in tiles, to be read from top to bottom. Report 001 has a 16 x 16 version of it.

The kernel comes first, then the function that launches it. Needs Triton.

**The task.** c = a @ b with a [M, K] and b [K, N]. Each of the M*N outputs is a sum over K, so the arithmetic
is 2*M*N*K operations. If every output fetched its own row of a and column of b, 2*M*N*K numbers would have to
be fetched: one for each operation. A GPU computes tens to hundreds of times faster than its memory delivers.

**Tiles.** A program computes an m x n block of outputs at once. It fetches an m x k block of a and a k x n
block of b into memory that is on the chip, uses every number of a's block n times and every number of b's
block m times. Numbers fetched for each operation fall from 1 to (1/m + 1/n) / 2. With 16 x 16 tiles that is
1/16: sixteen times less traffic. It is what report 001 did, and it is still too much: a tensor core is done
with a 16 x 16 x 16 step long before the next blocks arrive, and so short a step leaves nothing to hide the
waiting behind. With 128 x 256 it is 1/171. Much larger tiles do not fit: their m*n sums live in registers.

**Who does what.** In CUDA one writes the program of a thread, in Triton that of a block of threads:
`tl.arange(0, 16)` is a vector spread over the threads, `tl.load` fetches a block, `tl.dot` multiplies two.
Putting the operands of `tl.dot` into shared memory, unrolling, and fetching the next blocks while these are
multiplied ("stages") is left to the compiler.

**Coalescing.** The 32 threads of a warp fetch together, in sectors of 32 bytes. If neighbouring threads want
neighbouring addresses, all of every sector is used. The compiler lays the threads along the axis with stride
1, whichever it is, so a transposed b costs little; an input without a stride of 1 costs a sector a number.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def matmul_tile(
    a,
    b,
    c,
    M,
    N,
    K,
    a_row,
    a_column,
    b_row,
    b_column,
    c_row,
    c_column,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # ---- Which tile does this program compute? Programs are numbered, and start in about that order.
    tiles_down = tl.cdiv(M, TILE_M)
    tiles_across = tl.cdiv(N, TILE_N)
    tile = tl.program_id(0)

    # Row after row would be the obvious order. Programs that run at the same time would then share their rows
    # of a, but need nearly all of b between them, which is more than the L2 cache holds. Instead we go GROUP
    # tiles down, then one to the right, and so on: those that run together form a rough square, which needs
    # few rows of a and few columns of b, and most of its fetches are served from L2.
    band_size = GROUP * tiles_across
    band = tile // band_size
    band_top = band * GROUP
    band_height = tl.minimum(tiles_down - band_top, GROUP)  # the last band may be lower
    tile_row = band_top + (tile % band_size) % band_height
    tile_column = (tile % band_size) // band_height

    # ---- The numbers of our rows and columns. At the edge of the matrix some are past its end; a mask says
    # so, and masked loads fetch nothing. Without masks every size would have to be a multiple of the tile.
    rows = tile_row * TILE_M + tl.arange(0, TILE_M)
    columns = tile_column * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    row_is_real = rows < M
    column_is_real = columns < N

    # ---- A block of addresses for each operand: `x[:, None] + y[None, :]` makes a table of sums. Strides
    # instead of "row * K + column", so that transposed and sliced inputs need no copy. In 64 bits, since
    # offsets may pass 2**31.
    wide_inner = inner.to(tl.int64)
    a_block = a + rows[:, None].to(tl.int64) * a_row + wide_inner[None, :] * a_column
    b_block = b + wide_inner[:, None] * b_row + columns[None, :].to(tl.int64) * b_column

    # ---- The loop over K. The sums are float32 whatever the inputs are: in bfloat16, with its 8 bits, a sum
    # stops growing once it is 256 times its terms. They stay in registers until the end.
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, TILE_K)):
        inner_is_real = inner < K - step * TILE_K
        # Zeros past the end: they add nothing to the sums.
        a_now = tl.load(a_block, mask=row_is_real[:, None] & inner_is_real[None, :], other=0.0)
        b_now = tl.load(b_block, mask=inner_is_real[:, None] & column_is_real[None, :], other=0.0)
        # "ieee": float32 is multiplied as float32, not rounded to TF32's 10 bits for the tensor cores.
        sums = tl.dot(a_now, b_now, sums, input_precision="ieee")
        a_block += TILE_K * a_column
        b_block += TILE_K * b_row

    # ---- Round once, store once.
    c_block = c + rows[:, None].to(tl.int64) * c_row + columns[None, :] * c_column
    tl.store(c_block, sums.to(c.dtype.element_ty), mask=row_is_real[:, None] & column_is_real[None, :])


@dataclass(frozen=True)
class MatmulTile:
    """One program computes an m x n tile of the product, k columns of a and k rows of b at a time.

    m, n, k: powers of two from 16 on, which is what tl.dot takes.
    group: how many tiles one above the other are computed before moving right (see matmul_tile).
    warps: 32 threads each. stages: how many steps of the loop over K have their loads in flight at once.
    """

    m: int
    n: int
    k: int
    group: int = 8
    warps: int = 4
    stages: int = 3


def tiled_matmul(a: Tensor, b: Tensor, tile: MatmulTile) -> Tensor:
    """a @ b for a [M, K] and b [K, N] of one dtype on one GPU, with any strides. Sums are float32."""
    (rows, inner), columns = a.shape, b.shape[1]
    c = a.new_empty(rows, columns)
    matmul_tile[(-(-rows // tile.m) * -(-columns // tile.n),)](
        *(a, b, c),
        *(rows, columns, inner),
        *(*a.stride(), *b.stride(), *c.stride()),
        TILE_M=tile.m,
        TILE_N=tile.n,
        TILE_K=tile.k,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return c
