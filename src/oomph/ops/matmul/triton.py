# mypy: disable-error-code="no-untyped-def"
"""A matrix product in tiles, to be read from top to bottom.

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

import triton
import triton.language as tl


@triton.jit
def matmul_tile(
    a,
    b,
    c,
    partials,
    M,
    N,
    K,
    a_group,
    a_row,
    a_column,
    b_group,
    b_row,
    b_column,
    c_group,
    c_row,
    c_column,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
    EPILOGUE: tl.constexpr,  # "none", "rowmax" or "logsumexp"
    STORE: tl.constexpr,  # is the product itself wanted?
):
    # ---- Which tile is ours? Programs are numbered 0, 1, 2, ... and start about in that order.
    tiles_down = tl.cdiv(M, TILE_M)
    tiles_across = tl.cdiv(N, TILE_N)
    tiles = tiles_down * tiles_across
    program = tl.program_id(0)
    group = (program // tiles).to(tl.int64)  # of the batch; 64 bits, since offsets may pass 2**31
    tile = program % tiles

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
    # instead of "row * K + column", so that transposed and sliced inputs need no copy.
    wide_inner = inner.to(tl.int64)
    a_block = a + group * a_group + rows[:, None].to(tl.int64) * a_row + wide_inner[None, :] * a_column
    b_block = b + group * b_group + wide_inner[:, None] * b_row + columns[None, :].to(tl.int64) * b_column

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

    # ---- The epilogue: while the sums are still in registers, a reduction over them costs next to nothing.
    # Read back from memory later it would cost a pass over M*N numbers. A program sees TILE_N of its rows' N
    # columns, so it writes one partial result for each row, and `combine_partials` makes one number of them.
    # Programs could instead add to one number atomically, but then the order of the additions, and with it
    # the last digit, would change from run to run.
    if EPILOGUE != "none":
        seen = tl.where(column_is_real[None, :], sums, float("-inf"))  # the zeros past the edge must not win
        largest = tl.max(seen, axis=1)
        if EPILOGUE == "rowmax":
            # tl.max passes over NaN; a NaN in the row has to come out.
            nans = tl.max((seen != seen).to(tl.int32), axis=1)
            part = tl.where(nans > 0, float("nan"), largest)
        else:
            # log(sum(exp(x))) as m + log(sum(exp(x - m))), whose exponentials cannot overflow. inf - inf is
            # NaN, so an infinite m is not subtracted; the result is then that infinity, as it should be.
            base = tl.where((largest == float("inf")) | (largest == float("-inf")), 0.0, largest)
            part = base + tl.log(tl.sum(tl.exp(seen - base[:, None]), axis=1))
        # partials is [batch, tiles_across, M]: neighbouring rows are neighbours in memory (coalesced).
        place = (group * tiles_across + tile_column) * M + rows
        tl.store(partials + place, part, mask=row_is_real)

    # ---- Round once, store once.
    if STORE:
        c_block = c + group * c_group + rows[:, None].to(tl.int64) * c_row + columns[None, :] * c_column
        real = row_is_real[:, None] & column_is_real[None, :]
        tl.store(c_block, sums.to(c.dtype.element_ty), mask=real)


@triton.jit
def combine_partials(
    partials,
    statistic,
    M,
    parts,
    row_blocks,
    ROWS: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """One number for each row out of its partial results, always in the same order."""
    program = tl.program_id(0)
    group = (program // row_blocks).to(tl.int64)
    rows = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    real = rows < M
    total = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    for i in range(parts):
        part = tl.load(partials + (group * parts + i) * M + rows, mask=real, other=float("-inf"))
        if EPILOGUE == "rowmax":
            # Comparisons with NaN are false: written so that a NaN on either side is what stays.
            total = tl.where((part > total) | (part != part), part, total)
        else:
            larger = tl.maximum(total, part)
            base = tl.where((larger == float("inf")) | (larger == float("-inf")), 0.0, larger)
            joined = base + tl.log(tl.exp(total - base) + tl.exp(part - base))
            # tl.maximum may pass over NaN; the sum of the exponentials would not, unless base hid it.
            total = tl.where((part != part) | (total != total), float("nan"), joined)
    tl.store(statistic + group * M + rows, total, mask=real)
