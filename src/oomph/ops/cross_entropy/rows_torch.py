"""Softmax statistics and gradients of a block of logits in plain torch, in place as far as that goes."""

import torch
from torch import Tensor

from oomph.ops.cross_entropy.problem import LossOptions, Rows, RowStatistics


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
    """Fill `stats` (find_lse) and overwrite the logits with the gradient of the loss (write_gradient).

    The columns start at `column` of this rank's part of the vocabulary. `merge`: the statistics already hold
    those of other columns, and take in these. What is merged is not differentiated in the same call.
    """
    v, kept = logits_RV.shape[1], rows.kept
    target = rows.target - column
    owned = kept & (target >= 0) & (target < v)
    safe_target = torch.where(owned, target, 0).unsqueeze(1)
    class_weight = None if rows.class_weight is None else rows.class_weight[column : column + v]

    # Half precision is widened into a copy of the block; fp32 and float64 are worked on where they are, but
    # only when the logits may be overwritten.
    wide = logits_RV.to(rows.scale.dtype, copy=options.softcap is not None and not write_gradient)
    cap = options.softcap
    if cap is not None:
        wide = wide.div_(cap).tanh_().mul_(cap)
    if find_lse:
        target_logit = torch.where(owned, wide.gather(1, safe_target).squeeze(1), 0.0)
        stats.target_logit.copy_(stats.target_logit + target_logit if merge else target_logit)
        if stats.smooth_sum is not None:
            smooth = wide.sum(1) if class_weight is None else wide @ class_weight
            smooth = torch.where(kept, smooth, 0.0)
            stats.smooth_sum.copy_(stats.smooth_sum + smooth if merge else smooth)
        if not write_gradient:
            lse = torch.logsumexp(wide, 1)
            lse = torch.logaddexp(stats.lse, lse) if merge else lse
            stats.lse.copy_(torch.where(kept, lse, 0.0))
            return
    slope = None if cap is None else 1.0 - (wide / cap).square_()
    if find_lse:
        # exp once: its sum gives the log-sum-exp, and scaled it is the softmax.
        top = wide.amax(1).nan_to_num_(neginf=0.0)
        p = wide.sub_(top.unsqueeze(1)).exp_()
        total = p.sum(1)
        stats.lse.copy_(torch.where(kept, top + total.log(), 0.0))
    else:
        p = wide.sub_(stats.lse.unsqueeze(1)).exp_()
        total = torch.ones_like(stats.lse)

    scale = rows.scale
    on_target = scale * (1.0 - options.label_smoothing)
    if rows.target_weight is not None:
        on_target = on_target * rows.target_weight
    on_softmax = on_target
    uniform = options.label_smoothing / rows.n_classes
    if rows.weight_total is not None:
        on_softmax = on_softmax + scale * (uniform * rows.weight_total)
    if options.z_loss:
        on_softmax = on_softmax + scale * (2.0 * options.z_loss * stats.lse)
    if grad_lse is not None:
        on_softmax = on_softmax + grad_lse
    grad = p.mul_(torch.where(kept, on_softmax / total, 0.0).unsqueeze(1))
    grad.scatter_add_(1, safe_target, torch.where(owned, -on_target, 0.0).unsqueeze(1))
    if options.label_smoothing:
        even = (scale * uniform).unsqueeze(1)
        grad.sub_(even if class_weight is None else even * class_weight)
    if slope is not None:
        grad.mul_(slope)
    # 0 * inf in an ignored row would be NaN; the kernel writes 0 there, and so does this.
    grad.masked_fill_(~kept.unsqueeze(1), 0.0)
    if grad is not logits_RV:
        logits_RV.copy_(grad)
