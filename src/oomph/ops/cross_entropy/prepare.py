"""From the caller's arguments to rows: flattened, shifted, weighted, where asked without the ignored ones.

In one kernel where kernels run: the GPU waits for this before its first matrix product, and twenty small
operations would cost as much time as a tenth of a small model's loss.
"""

from dataclasses import replace

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.cross_entropy.arguments import Arguments
from oomph.ops.cross_entropy.problem import Rows
from oomph.ops.launch import Kernels

_KERNELS = Kernels("oomph.ops.cross_entropy.triton")


def shifted(target: Tensor, ignore_index: int) -> Tensor:
    """Each position's target is the next one's; the last has none. x stays where it is."""
    moved = torch.full_like(target, ignore_index)
    moved[..., :-1] = target[..., 1:]
    return moved


def shifted_weight(token_weight: Tensor) -> Tensor:
    """Weights follow their targets."""
    moved = torch.zeros_like(token_weight)
    moved[..., :-1] = token_weight[..., 1:]
    return moved


def check_values(a: Arguments) -> None:
    """What only the data can tell; waits for the GPU, hence only with check=True."""
    target, n_classes, ignore_index = a.target, a.weight.shape[0], a.ignore_index
    if a.shift:
        target = shifted(target, ignore_index)
    kept = target != ignore_index
    wrong = kept & ((target < 0) | (target >= n_classes))
    if bool(wrong.any()):
        value = int(target[wrong][0])
        raise ArgumentError(
            f"target {value} is out of range; valid: 0 to {n_classes - 1}, or ignore_index={ignore_index}"
        )
    count = int(kept.sum())
    if a.num_valid is not None and count > a.num_valid:
        raise ArgumentError(
            f"num_valid={a.num_valid}, but {count} targets are kept; give at least that number"
        )


def make_rows(
    a: Arguments, *, wide: torch.dtype, triton: bool, offset: int = 0, size: int | None = None
) -> Rows:
    """Everything per row, on the device, without waiting for it.

    `offset` and `size` say which part of the vocabulary this rank holds.
    """
    rows = (_rows_by_kernel if triton else _rows_by_torch)(a, wide, offset)
    if a.num_valid is not None and a.num_valid < rows.target.shape[0]:
        rows = _without_ignored(rows, a.num_valid)
    if rows.class_weight is not None and size is not None:
        rows = replace(rows, class_weight=rows.class_weight[offset : offset + size])
    return rows


def _rows_by_kernel(a: Arguments, wide: torch.dtype, offset: int) -> Rows:
    # The kernel goes over these as runs of numbers; reshape alone may leave strides.
    target_N = a.target.reshape(-1).contiguous()
    token_weight_N = None if a.token_weight is None else a.token_weight.reshape(-1).contiguous()
    n, n_classes = target_N.shape[0], a.weight.shape[0]
    class_weight = None if a.class_weight is None else a.class_weight.to(wide).contiguous()
    out_target_N = torch.empty(n, dtype=torch.int64, device=target_N.device)
    kept_N = torch.empty(n, dtype=torch.bool, device=target_N.device)
    scale_N = torch.empty(n, dtype=wide, device=target_N.device)
    target_weight_N = None if class_weight is None else torch.empty_like(scale_N)
    if n:
        _KERNELS.launch(
            "prepare_rows",
            (1,),
            target_N,
            token_weight_N,
            class_weight,
            out_target_N,
            kept_N,
            scale_N,
            target_weight_N,
            n,
            a.target.shape[-1] if a.shift else 1,
            a.ignore_index,
            n_classes,
            offset,
            SHIFT=a.shift,
            HAS_TOKEN_WEIGHT=a.token_weight is not None,
            HAS_CLASS_WEIGHT=class_weight is not None,
            MEAN=a.reduction == "mean",
            BLOCK=4096,
            num_warps=16,
        )
    return Rows(
        target=out_target_N,
        kept=kept_N,
        scale=scale_N,
        target_weight=target_weight_N,
        class_weight=class_weight,
        weight_total=_weight_total(a, class_weight, scale_N),
        n_classes=n_classes,
    )


def _rows_by_torch(a: Arguments, wide: torch.dtype, offset: int) -> Rows:
    target, token_weight = a.target, a.token_weight
    if a.shift:
        target = shifted(target, a.ignore_index)
        token_weight = None if token_weight is None else shifted_weight(token_weight)
    n_classes = a.weight.shape[0]
    target_N = target.reshape(-1).long()
    kept_N = target_N != a.ignore_index
    wrong_N = kept_N & ((target_N < 0) | (target_N >= n_classes))
    scale_N = kept_N.to(wide)
    if token_weight is not None:
        # Not a product: a weight of NaN on an ignored row counts for nothing.
        scale_N = torch.where(kept_N, token_weight.reshape(-1).to(wide), 0.0)
    class_weight = None if a.class_weight is None else a.class_weight.to(wide)
    target_weight_N = None if class_weight is None else class_weight[target_N.clamp(0, n_classes - 1)]
    if a.reduction == "mean":
        weights = scale_N if target_weight_N is None else scale_N * target_weight_N
        total = torch.where(wrong_N, 0.0, weights).sum()
        # Nothing kept: every scale is 0 and so are the loss and all gradients.
        scale_N = torch.where(total == 0, 0.0, scale_N / total)
    return Rows(
        target=target_N - offset if offset else target_N,
        kept=kept_N,
        scale=torch.where(wrong_N, torch.nan, scale_N),
        target_weight=target_weight_N,
        class_weight=class_weight,
        weight_total=_weight_total(a, class_weight, scale_N),
        n_classes=n_classes,
    )


def _weight_total(a: Arguments, class_weight: Tensor | None, like: Tensor) -> Tensor | None:
    """Sum of all class weights; only label smoothing asks for it."""
    if not a.label_smoothing:
        return None
    if class_weight is None:
        return like.new_full((1,), float(a.weight.shape[0]))
    return class_weight.sum().reshape(1)


def _without_ignored(rows: Rows, num_valid: int) -> Rows:
    # One row at least: of none, the loss could not be NaN.
    index = _kept_first(rows.kept)[: max(1, num_valid)]
    # More kept than announced would be left out unseen: the loss says so instead.
    scale_N = torch.where(rows.kept.sum() > num_valid, torch.nan, rows.scale)
    return replace(
        rows,
        target=rows.target[index],
        kept=rows.kept[index],
        scale=scale_N[index],
        target_weight=None if rows.target_weight is None else rows.target_weight[index],
        index=index,
    )


def _kept_first(kept_N: Tensor) -> Tensor:
    """All row numbers, those of kept rows first, each group in order. Sums instead of a sort or a count."""
    kept = kept_N.long()
    behind_kept = kept.sum() + (1 - kept).cumsum(0) - 1
    place = torch.where(kept_N, kept.cumsum(0) - 1, behind_kept)
    numbers = torch.arange(kept.shape[0], device=kept.device)
    return torch.empty_like(numbers).scatter_(0, place, numbers)
