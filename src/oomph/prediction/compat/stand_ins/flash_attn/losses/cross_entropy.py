"""Memory: Dao-AILab/flash-attention, flash_attn/losses/cross_entropy.py."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.triton.cross_entropy import cross_entropy_loss


class CrossEntropyLoss(nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError("Only support reduction = 'mean' or 'none' or 'sum'")
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        self.inplace_backward, self.process_group = inplace_backward, process_group
        self.return_z_loss = return_z_loss

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        losses = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        reduced = [self._reduced(each, target) for each in losses[: 2 if self.return_z_loss else 1]]
        return tuple(reduced) if self.return_z_loss else reduced[0]

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "mean":
            return losses.sum() / (target != self.ignore_index).sum()
        return losses.sum() if self.reduction == "sum" else losses
