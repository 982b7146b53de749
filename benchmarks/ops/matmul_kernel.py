# mypy: disable-error-code="no-untyped-def"
"""A matrix product in tiles, to be read from top to bottom. Report 001 has a 16 x 16 version of it.

The kernel comes first, then its launch, the plain-torch version, gradients and the function. Needs Triton.

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
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.common import (
    Kernels,
    check_floating,
    check_one_of,
    check_same_device,
    check_same_dtype,
    no_autocast,
    no_compile,
    refuse_second_derivatives,
    why_not_triton,
)

_KERNELS = Kernels(__name__)
_ROWS_PER_COMBINING_PROGRAM = 128
_SIDES = (16, 32, 64, 128, 256)  # tl.dot takes powers of two from 16 on


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
    EPILOGUE: tl.constexpr,  # is the log-sum-exp of each row wanted?
    STORE: tl.constexpr,  # is the product itself wanted?
):
    # ---- Which tile does this program compute? Programs are numbered, and start in about that order.
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
    if EPILOGUE:
        seen = tl.where(column_is_real[None, :], sums, float("-inf"))  # zeros past the edge do not count
        largest = tl.max(seen, axis=1)
        # log(sum(exp(x))) as m + log(sum(exp(x - m))), whose exponentials cannot overflow. inf - inf is NaN,
        # so an infinite m is not subtracted; the result is then that infinity, as it should be.
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
def combine_partials(partials, lse, M, parts, row_blocks, ROWS: tl.constexpr):
    """One log-sum-exp for each row out of its partial ones, always in the same order."""
    program = tl.program_id(0)
    group = (program // row_blocks).to(tl.int64)
    rows = (program % row_blocks) * ROWS + tl.arange(0, ROWS)
    real = rows < M
    total = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    for i in range(parts):
        part = tl.load(partials + (group * parts + i) * M + rows, mask=real, other=float("-inf"))
        larger = tl.maximum(total, part)
        base = tl.where((larger == float("inf")) | (larger == float("-inf")), 0.0, larger)
        joined = base + tl.log(tl.exp(total - base) + tl.exp(part - base))
        # tl.maximum may pass over NaN; the sum of the exponentials would not, unless base hid it.
        total = tl.where((part != part) | (total != total), float("nan"), joined)
    tl.store(lse + group * M + rows, total, mask=real)


# The shape of a tile, and the kernel's launch -------------------------------------------------------
# Legend: G batch, M rows, K inner, N columns.


@dataclass(frozen=True)
class MatmulTile:
    """One program computes an m x n tile of the product, k columns of a and k rows of b at a time.

    group: how many tiles one above the other are computed before moving right (see matmul_tile).
    warps: 32 threads each. stages: how many steps of the loop over K have their loads in flight at once.
    """

    m: int
    n: int
    k: int
    group: int = 8
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        if not {self.m, self.n, self.k} <= set(_SIDES):
            raise ArgumentError(f"{self!r} is not valid; each side is one of {_SIDES}")


def _default_tile(dtype: torch.dtype, rows: int) -> MatmulTile:
    """The largest tile whose sums fit the registers."""
    if dtype == torch.float32:  # without tensor cores: registers, not bandwidth, are the limit
        m, k = (64, 16) if rows > 32 else (16, 32)
        return MatmulTile(m, 64, k, warps=4, stages=3)
    if rows <= 64:  # a taller tile would be mostly edge
        return MatmulTile(64 if rows > 16 else 16, 128, 64, warps=4, stages=4)
    return MatmulTile(128, 256, 64, warps=8, stages=3)


def _matmul_triton(
    a_GMK: Tensor, b_GKN: Tensor, tile: MatmulTile, with_lse: bool, return_product: bool
) -> tuple[Tensor | None, Tensor | None]:
    (groups, rows, inner), columns = a_GMK.shape, b_GKN.shape[2]
    down, across = -(-rows // tile.m), -(-columns // tile.n)
    c = a_GMK.new_empty(groups, rows, columns) if return_product else None
    lse = partials = None
    if with_lse:
        lse = a_GMK.new_empty(groups, rows, dtype=torch.float32)
        partials = a_GMK.new_empty(groups, across, rows, dtype=torch.float32)
    if groups * down * across > 0:
        _KERNELS.launch(
            "matmul_tile",
            (groups * down * across,),
            a_GMK,
            b_GKN,
            a_GMK if c is None else c,  # not touched when it is not wanted
            a_GMK if partials is None else partials,
            *(rows, columns, inner),
            *_strides(a_GMK),
            *_strides(b_GKN),
            *((0, 0, 0) if c is None else _strides(c)),
            TILE_M=tile.m,
            TILE_N=tile.n,
            TILE_K=tile.k,
            GROUP=tile.group,
            EPILOGUE=with_lse,
            STORE=return_product,
            flops=2.0 * groups * rows * columns * inner,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if lse is not None and lse.numel() > 0:
        row_blocks = -(-rows // _ROWS_PER_COMBINING_PROGRAM)
        arguments = (partials, lse, rows, across, row_blocks)
        _KERNELS.launch(
            "combine_partials", (groups * row_blocks,), *arguments, ROWS=_ROWS_PER_COMBINING_PROGRAM
        )
    return c, lse


def _strides(x: Tensor) -> tuple[int, ...]:
    """0 for a batch of one: the compiler then sees that every row is as aligned as the first."""
    return x.stride() if x.shape[0] > 1 else (0, *x.stride()[1:])


# Plain torch, and gradients --------------------------------------------------------------------------


def matmul_reference(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a @ b in float32 (float64 for float64), rounded once; the log-sum-exp of each unrounded row."""
    wide = torch.promote_types(a.dtype, torch.float32)
    product = a.to(wide) @ b.to(wide)
    return product.to(a.dtype), product.logsumexp(dim=-1)


class _Matmul(torch.autograd.Function):
    """(c, log-sum-exp) of [G, M, K] and [G, K, N]; what was not asked for is None."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, tile: MatmulTile, with_lse: bool, return_product: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        c, lse = _matmul_triton(a, b, tile, with_lse, return_product)
        ctx.save_for_backward(a, b, lse)
        ctx.set_materialize_grads(False)
        return c, lse

    @staticmethod
    def backward(ctx: Any, grad_c: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("tiled_matmul")
        a, b, lse = ctx.saved_tensors
        dtype = a.dtype
        with no_autocast(a):
            if grad_lse is not None:
                # The gradient of a log-sum-exp is the softmax: the product is computed again, in float32.
                a, b = a.to(lse.dtype), b.to(lse.dtype)
                softmax = torch.bmm(a, b).sub_(lse.unsqueeze(-1)).exp_()
                grad = softmax.mul_(grad_lse.unsqueeze(-1))
                grad_c = grad if grad_c is None else grad.add_(grad_c)
            if grad_c is None:
                return (None,) * 5
            grad_a = torch.bmm(grad_c, b.mT).to(dtype) if ctx.needs_input_grad[0] else None
            grad_b = torch.bmm(a.mT, grad_c).to(dtype) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None, None, None


@no_compile
def tiled_matmul(
    a: Tensor,
    b: Tensor,
    *,
    tile: MatmulTile | None = None,
    epilogue: str | None = None,
    return_product: bool = True,
    impl: str = "auto",
) -> Any:
    """a @ b by a small tiled kernel, with the log-sum-exp of each row from the same pass.

    a: [M, K] or [..., M, K]. b: [K, N], or [..., K, N] with a's leading dimensions. Any sizes and strides.
    epilogue: "logsumexp" of each row of the product, [..., M]: of the unrounded sums, in float32, the same on
    every run; over no columns it is -inf; NaN in a row propagates.
    Returns c; or (c, lse); or lse alone with return_product=False, when the product is never stored: one
    number for each row and column of tiles is stored instead.
    impl: "triton", "reference" (plain torch), or "auto": Triton on CUDA, for all but float64.

    Sums are float32 (float64 for float64, in plain torch). Differentiable once. Saved for backward: a, b and
    lse. Without epilogue the gradients are two plain products; with one, the product is computed again.
    """
    _check(a, b, epilogue, return_product, impl)
    obstacle = why_not_triton(a)
    if obstacle is None and a.dtype == torch.float64:
        obstacle = "the kernel adds in float32, and the inputs are float64"
    if impl == "triton" and obstacle:
        raise ArgumentError(f"impl='triton' cannot run: {obstacle}; choose 'auto' or 'reference'")
    lead, (rows, inner), columns = a.shape[:-2], a.shape[-2:], b.shape[-1]
    if b.dim() == 2:  # one b for all: the rows of all of a in one product
        a_GMK, b_GKN = a.reshape(1, lead.numel() * rows, inner), b.unsqueeze(0)
    else:
        a_GMK, b_GKN = a.reshape(lead.numel(), rows, inner), b.reshape(lead.numel(), inner, columns)
    if impl == "triton" or (impl == "auto" and a.device.type == "cuda" and obstacle is None):
        tile = tile or _default_tile(a.dtype, rows)
        c, lse = _Matmul.apply(a_GMK, b_GKN, tile, epilogue is not None, return_product)
    else:
        with no_autocast(a):
            c, lse = matmul_reference(a_GMK, b_GKN)
    if epilogue is None:
        return c.reshape(*lead, rows, columns)
    lse = lse.reshape(*lead, rows)
    return (c.reshape(*lead, rows, columns), lse) if return_product else lse


def _check(a: Tensor, b: Tensor, epilogue: str | None, return_product: bool, impl: str) -> None:
    check_one_of("impl", impl, ("auto", "reference", "triton"))
    check_one_of("epilogue", epilogue, (None, "logsumexp"))
    check_floating(a=a, b=b)
    check_same_device(a=a, b=b)
    check_same_dtype(a=a, b=b)
    matrices = a.dim() >= 2 and b.dim() >= 2 and a.shape[-1] == b.shape[-2]
    if not matrices or (b.dim() > 2 and a.shape[:-2] != b.shape[:-2]):
        given = f"a has shape {list(a.shape)} and b {list(b.shape)}"
        raise ArgumentError(f"{given}; valid: a [..., M, K] and b [K, N], or b with a's leading dimensions")
    if not return_product and epilogue is None:
        raise ArgumentError("return_product=False leaves nothing to return; give epilogue='logsumexp'")
