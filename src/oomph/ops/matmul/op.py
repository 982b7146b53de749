"""The public `tiled_matmul`: arguments checked, the implementation chosen, the kernel started, gradients.

Legend: G batch, M rows, K inner, N columns.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.common import (
    Choice,
    check_floating,
    check_one_of,
    check_same_device,
    check_same_dtype,
    choose_triton_or_torch,
    explained_by,
    log_choice,
    no_autocast,
    no_compile,
    refuse_second_derivatives,
)
from oomph.ops.launch import Kernels, why_not_triton
from oomph.ops.matmul.chunked import matmul_in_blocks, statistic_gradients
from oomph.ops.matmul.reference import matmul_reference
from oomph.ops.matmul.tile import Tile, resolve

IMPLS = ("auto", "reference", "chunked", "triton")
EPILOGUES = (None, "rowmax", "logsumexp")
_KERNELS = Kernels("oomph.ops.matmul.triton")
_ROWS_PER_COMBINING_PROGRAM = 128


def _choose(a: Tensor, b: Tensor, tile: Tile | int | None, impl: str, **_: Any) -> Choice:
    check_one_of("impl", impl, IMPLS)
    check_floating(a=a, b=b)
    obstacle = why_not_triton(a)
    if obstacle is None and _computed_in(a, b) == torch.float64:
        obstacle = "the kernel adds in float32, and the inputs are float64"
    size = resolve(tile, _computed_in(a, b), a.shape[-2] if a.dim() > 1 else 0)
    choice = choose_triton_or_torch(
        impl,
        a,
        obstacle,
        kernels="the tiled kernel, row statistics in its epilogue (for the product alone take torch.matmul)",
    )
    return replace(choice, settings={"tile": size}) if choice.impl == "triton" else choice


@explained_by(_choose)
def tiled_matmul(
    a: Tensor,
    b: Tensor,
    *,
    tile: Tile | int | None = None,
    epilogue: str | None = None,
    return_product: bool = True,
    impl: str = "auto",
) -> Any:
    """a @ b by a small tiled kernel that is there to be read, with a row statistic from the same pass.

    a: [M, K] or [..., M, K]. b: [K, N], or [..., K, N] with a's leading dimensions. Any sizes and strides.
    epilogue: "rowmax" or "logsumexp" of each row of the product, [..., M]: of the unrounded sums, in float32,
    the same on every run; over no columns it is -inf; NaN in a row comes out.
    Returns c; or (c, statistic); or the statistic alone with return_product=False, when the product is never
    stored: its place is taken by one number for each row and column of tiles.
    tile: a Tile, or the side of a square one (16 is report 001's); the kernel alone uses it.

    Sums are float32 (float64 for float64, which the plain implementation takes). Under autocast inputs
    are cast as torch.matmul's are. Differentiable once: saved are a, b and the statistic. Without epilogue
    the gradients are two plain products; with one, the product is recomputed in float32 by blocks of rows,
    beside one b and its gradient in float32.
    The gradient of "rowmax" goes to one largest element of each row; which of several equal ones is not
    said. That of "logsumexp" is the softmax of the row; where the row's logsumexp is -inf it is NaN.
    """
    _check(a, b, epilogue, return_product)
    a, b = _as_autocast_wants(a, b)
    check_same_dtype(a=a, b=b)
    check_one_of("impl", impl, IMPLS)
    return _tiled_matmul(a, b, tile, epilogue, return_product, impl)


@no_compile
def _tiled_matmul(
    a: Tensor, b: Tensor, tile: Tile | int | None, epilogue: str | None, return_product: bool, impl: str
) -> Any:
    choice = log_choice("tiled_matmul", _choose(a, b, tile, impl))
    lead, (rows, inner), columns = a.shape[:-2], a.shape[-2:], b.shape[-1]
    if b.dim() == 2:  # one b for all: the rows of all of a in one product
        a_GMK, b_GKN = a.reshape(1, lead.numel() * rows, inner), b.unsqueeze(0)
    else:
        a_GMK, b_GKN = a.reshape(lead.numel(), rows, inner), b.reshape(lead.numel(), inner, columns)
    if choice.impl == "reference":
        with no_autocast(a):
            c, statistic = matmul_reference(a_GMK, b_GKN, epilogue)
    else:
        c, statistic = _Product.apply(a_GMK, b_GKN, choice.settings.get("tile"), epilogue, return_product)
    results = []
    if return_product and c is not None:
        results.append(c.reshape(*lead, rows, columns))
    if statistic is not None:
        results.append(statistic.reshape(*lead, rows))
    return results[0] if len(results) == 1 else tuple(results)


class _Product(torch.autograd.Function):
    """(c, statistic) of [G, M, K] and [G, K, N]; what was not asked for is None. tile None: plain torch."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, tile: Tile | None, epilogue: str | None, return_product: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        with no_autocast(a):
            if tile is None:
                c, statistic = matmul_in_blocks(a, b, epilogue, return_product)
            else:
                c, statistic = _by_kernel(a, b, tile, epilogue, return_product)
        ctx.save_for_backward(a, b, statistic)
        ctx.epilogue = epilogue
        ctx.set_materialize_grads(False)
        return c, statistic

    @staticmethod
    def backward(ctx: Any, grad_c: Tensor | None, grad_statistic: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("tiled_matmul")
        a, b, statistic = ctx.saved_tensors
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_a: Tensor | None = None
        grad_b: Tensor | None = None
        with no_autocast(a):
            if grad_statistic is not None:
                grad_a, grad_b = statistic_gradients(
                    a, b, statistic, grad_c, grad_statistic, ctx.epilogue, needs
                )
            elif grad_c is not None:
                grad_a = torch.bmm(grad_c, b.mT) if needs[0] else None
                grad_b = torch.bmm(a.mT, grad_c) if needs[1] else None
        return grad_a, grad_b, None, None, None


def _by_kernel(
    a_GMK: Tensor, b_GKN: Tensor, tile: Tile, epilogue: str | None, return_product: bool
) -> tuple[Tensor | None, Tensor | None]:
    groups, rows, inner = a_GMK.shape
    columns = b_GKN.shape[2]
    down, across = -(-rows // tile.m), -(-columns // tile.n)
    c = a_GMK.new_empty(groups, rows, columns) if return_product else None
    statistic = partials = None
    if epilogue is not None:
        statistic = a_GMK.new_empty(groups, rows, dtype=torch.float32)
        partials = a_GMK.new_empty(groups, across, rows, dtype=torch.float32)
    if groups * down * across > 0:
        _KERNELS.launch(
            "matmul_tile",
            (groups * down * across,),
            a_GMK,
            b_GKN,
            a_GMK if c is None else c,  # not touched when it is not wanted
            a_GMK if partials is None else partials,
            rows,
            columns,
            inner,
            *_strides(a_GMK),
            *_strides(b_GKN),
            *((0, 0, 0) if c is None else _strides(c)),
            TILE_M=tile.m,
            TILE_N=tile.n,
            TILE_K=tile.k,
            GROUP=tile.group,
            EPILOGUE=epilogue or "none",
            STORE=return_product,
            flops=2.0 * groups * rows * columns * inner,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    if statistic is not None and partials is not None and statistic.numel() > 0:
        row_blocks = -(-rows // _ROWS_PER_COMBINING_PROGRAM)
        _KERNELS.launch(
            "combine_partials",
            (groups * row_blocks,),
            partials,
            statistic,
            rows,
            across,
            row_blocks,
            ROWS=_ROWS_PER_COMBINING_PROGRAM,
            EPILOGUE=epilogue,
        )
    return c, statistic


def _strides(x: Tensor) -> tuple[int, ...]:
    """0 for a batch of one: the compiler then sees that every row is as aligned as the first."""
    return x.stride() if x.shape[0] > 1 else (0, *x.stride()[1:])


def _check(a: Tensor, b: Tensor, epilogue: str | None, return_product: bool) -> None:
    check_floating(a=a, b=b)
    check_same_device(a=a, b=b)
    check_one_of("epilogue", epilogue, EPILOGUES)
    if a.dim() < 2 or b.dim() < 2:
        raise ArgumentError(
            f"a has shape {list(a.shape)} and b {list(b.shape)}; valid: [..., M, K] and [K, N] or [..., K, N]"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ArgumentError(
            f"a has shape {list(a.shape)} and b {list(b.shape)}; the last of a and the last but one of b "
            "must be equal"
        )
    if b.dim() > 2 and a.shape[:-2] != b.shape[:-2]:
        raise ArgumentError(
            f"a has shape {list(a.shape)} and b {list(b.shape)}; b is [K, N] or has a's leading dimensions"
        )
    if not return_product and epilogue is None:
        raise ArgumentError(
            "return_product=False leaves nothing to return; give epilogue='rowmax' or 'logsumexp'"
        )


def _autocast_dtype(a: Tensor, b: Tensor) -> torch.dtype | None:
    """What autocast would cast torch.matmul's inputs to; None where it leaves them alone."""
    kind = a.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return None if torch.float64 in (a.dtype, b.dtype) else torch.get_autocast_dtype(kind)


def _computed_in(a: Tensor, b: Tensor) -> torch.dtype:
    return _autocast_dtype(a, b) or a.dtype


def _as_autocast_wants(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = _autocast_dtype(a, b)
    return (a, b) if dtype is None else (a.to(dtype), b.to(dtype))
