"""One loss to compute, in the form the sweeps work on: rows of tokens, with everything per row in one place.

N tokens, D hidden size, V classes (of this rank's part of the vocabulary), n_classes of the whole one.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOptions:
    """The numbers that shape the loss of a token."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


@dataclass(frozen=True)
class Rows:
    """What is known of each row before its logits are. All [N]; fp32, or float64 for float64 inputs."""

    target: Tensor  # int64, counted from the start of this rank's part of the vocabulary
    kept: Tensor  # bool: not ignored
    scale: Tensor  # what the row's loss is multiplied with; 0 for ignored rows, NaN for impossible targets
    target_weight: Tensor | None  # class weight of the target
    class_weight: Tensor | None  # [V] of this rank's part of the vocabulary
    weight_total: Tensor | None  # [1]: sum of all class weights (their number without weights), for smoothing
    n_classes: int  # of the whole vocabulary
    index: Tensor | None = None  # int64: the row of x each row stands for; None: row n is x[n]

    def part(self, first: int, end: int) -> "Rows":
        """Some of the rows, as views."""
        if first == 0 and end == self.target.shape[0]:
            return self
        of_all = (self.target, self.kept, self.scale, self.target_weight, self.index)
        target, kept, scale, target_weight, index = (
            None if values is None else values[first:end] for values in of_all
        )
        assert target is not None
        assert kept is not None
        assert scale is not None
        return replace(self, target=target, kept=kept, scale=scale, target_weight=target_weight, index=index)

    def times(self, factor: Tensor) -> "Rows":
        """The same rows, each row's loss multiplied once more."""
        # An ignored row stays 0 whatever arrives for it, NaN included.
        return replace(self, scale=torch.where(self.kept, self.scale * factor, 0.0))


@dataclass(frozen=True)
class RowStatistics:
    """What the logits of a row come down to. All [N]; 0 for ignored rows."""

    lse: Tensor  # log-sum-exp
    target_logit: Tensor
    smooth_sum: Tensor | None  # sum over classes of class weight * logit; only with label smoothing
    target_gradient: Tensor | None  # of the loss, at the target's logit; only where TargetRows are used

    @staticmethod
    def empty(n: int, like: Tensor, *, smooth: bool, targets: bool) -> "RowStatistics":
        return RowStatistics(
            like.new_empty(n),
            like.new_empty(n),
            like.new_empty(n) if smooth else None,
            like.new_empty(n) if targets else None,
        )

    def part(self, first: int, end: int) -> "RowStatistics":
        if first == 0 and end == self.lse.shape[0]:
            return self
        of_all = (self.lse, self.target_logit, self.smooth_sum, self.target_gradient)
        return RowStatistics(*(None if values is None else values[first:end] for values in of_all))  # type: ignore[arg-type]


def token_losses(stats: RowStatistics, rows: Rows, options: LossOptions) -> Tensor:
    """The loss of every row, scaled; [N]."""
    nll = stats.lse - stats.target_logit
    if rows.target_weight is not None:
        nll = nll * rows.target_weight
    loss = nll if not options.label_smoothing else (1.0 - options.label_smoothing) * nll
    if stats.smooth_sum is not None and rows.weight_total is not None:
        smooth = rows.weight_total * stats.lse - stats.smooth_sum
        loss = loss + (options.label_smoothing / rows.n_classes) * smooth
    if options.z_loss:
        loss = loss + options.z_loss * stats.lse.square()
    # Not a product with a 0 scale: an ignored row counts for nothing even where its logits are NaN.
    return torch.where(rows.kept, loss * rows.scale, 0.0)
