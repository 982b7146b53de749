"""The kernels' side of it: softmax_rows as in rows_torch, and what only kernels do."""

import torch
from torch import Tensor

from oomph.ops.cross_entropy.problem import LossOptions, Rows, RowStatistics
from oomph.ops.launch import Kernels

_KERNELS = Kernels("oomph.ops.cross_entropy.triton")


def softmax_rows(
    logits_RV: Tensor,
    rows: Rows,
    stats: RowStatistics,
    options: LossOptions,
    *,
    column: int = 0,
    find_lse: bool,
    merge: bool = False,
    write_gradient: bool,
    grad_lse: Tensor | None = None,
) -> None:
    n, v = logits_RV.shape
    block, warps = _block(v)
    class_weight = None if rows.class_weight is None else rows.class_weight[column : column + v]
    _KERNELS.launch(
        "softmax_rows",
        (n,),
        logits_RV,
        logits_RV.stride(0),
        rows.target,
        column,
        rows.kept,
        rows.scale,
        rows.target_weight,
        class_weight,
        grad_lse,
        rows.weight_total,
        stats.lse,
        stats.target_logit,
        stats.smooth_sum,
        stats.target_gradient,
        v,
        options.label_smoothing,
        options.label_smoothing / rows.n_classes,
        options.z_loss,
        options.softcap or 0.0,
        FIND_LSE=find_lse,
        passes=int(find_lse) + 2 * int(write_gradient),  # the gradient takes the logits' place
        MERGE=merge,
        WRITE_GRADIENT=write_gradient,
        KEEP_TARGET=stats.target_gradient is not None,
        SMOOTH=options.label_smoothing != 0.0,
        HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_SOFTCAP=options.softcap is not None,
        HAS_GRAD_LSE=grad_lse is not None,
        BLOCK=block,
        num_warps=warps,
    )


def clear_targets(gradient_RV: Tensor, rows: Rows, column: int) -> None:
    """Take each row's gradient at its target out: `add_target_rows` brings it to the weight."""
    n, v = gradient_RV.shape
    block = 256
    grid = (-(-n // block),)
    _KERNELS.launch(
        "clear_targets",
        grid,
        gradient_RV,
        gradient_RV.stride(0),
        rows.target,
        column,
        n,
        v,
        BLOCK=block,
        passes=1 / max(v, 1),
    )


def add_target_rows(weight_VD: Tensor, x_ND: Tensor, rows: Rows, target_gradient_N: Tensor) -> None:
    """weight[v] += target_gradient[n] * x[n] for every row n whose target is v, summed up in fp32."""
    n, (v, d) = rows.target.shape[0], weight_VD.shape
    # int32 takes half the passes of int64 to sort. Targets out of range stay so.
    target, order = rows.target.clamp(-1, v).to(torch.int32).sort()
    end = torch.searchsorted(target, target, right=True)
    block = min(1024, 1 << max(4, (d - 1).bit_length()))
    if n:
        _KERNELS.launch(
            "add_target_rows",
            (n, -(-d // block)),
            weight_VD,
            *weight_VD.stride(),
            x_ND,
            *x_ND.stride(),
            target_gradient_N,
            target,
            order,
            end,
            rows.index,
            rows.kept,
            v,
            d,
            HAS_INDEX=rows.index is not None,
            BLOCK=block,
            num_warps=4,
        )


def scale_in_place(values: Tensor, factor: Tensor) -> None:
    """values *= factor, at no cost where the factor is 1; `values` is contiguous, `factor` one number."""
    block, programs = 4096, 1024  # enough to fill a GPU; each goes on to further blocks
    grid = (min(programs, -(-values.numel() // block)),)
    if values.numel():
        _KERNELS.launch("scale_in_place", grid, values, values.numel(), factor, BLOCK=block, num_warps=8)


def _block(n_classes: int) -> tuple[int, int]:
    """Classes per load and warps per row: the best of those measured, from 4,000 to 150,000 classes."""
    block = 128
    while block < 8192 and block * 8 < n_classes:
        block *= 2
    return block, max(1, block // 256)
