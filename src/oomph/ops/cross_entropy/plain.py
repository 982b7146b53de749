"""The loss as most programs write it, all logits at once. The quickest way where they are small."""

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.ops.cross_entropy.problem import LossOptions, Rows

_IGNORED = -100


def plain_linear_cross_entropy(
    x_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    rows: Rows,
    options: LossOptions,
    *,
    per_token: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(loss, lse) like LinearCrossEntropy, through autograd; lse where asked for."""
    x = x_ND if rows.index is None else x_ND[rows.index]
    # Unlike most programs: softmax and all after it in fp32, so that no path is less exact than another.
    logits = F.linear(x, weight_VD, bias_V).to(rows.scale.dtype)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    # Targets that do not exist have a scale of NaN; they must not reach a kernel that reads where they point.
    target = torch.where(rows.kept, rows.target.clamp(0, rows.n_classes - 1), _IGNORED)
    losses = F.cross_entropy(
        logits,
        target,
        weight=rows.class_weight,
        ignore_index=_IGNORED,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    lse = None
    if options.z_loss or with_lse:
        lse = torch.where(rows.kept, torch.logsumexp(logits, 1), 0.0)
        losses = losses + options.z_loss * lse.square() if options.z_loss else losses
    loss = losses * rows.scale if per_token else torch.dot(losses, rows.scale)
    if rows.index is None:
        return loss, lse
    n = x_ND.shape[0]
    if per_token:
        loss = loss.new_zeros(n).index_copy(0, rows.index, loss)
    if lse is not None:
        lse = lse.new_zeros(n).index_copy(0, rows.index, lse)
    return loss, lse
