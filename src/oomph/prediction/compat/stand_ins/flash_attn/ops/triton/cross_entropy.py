"""Memory: Dao-AILab/flash-attention, flash_attn/ops/triton/cross_entropy.py. The classes of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from oomph.prediction.compat import stand_ins

_kernel = partial(stand_ins.kernel, "flash_attn")


class CrossEntropyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, lse: Tensor | None, inplace_backward: bool) -> Any:
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        if labels.shape != logits.shape[:1]:
            raise AssertionError("labels must have one entry for each row of logits")
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        lse = torch.empty_like(losses) if lse is None else lse.contiguous()
        z_losses = torch.empty_like(losses)
        _kernel((logits, labels, losses, lse, z_losses))
        ctx.save_for_backward(logits, lse, labels)
        ctx.mark_non_differentiable(z_losses)
        ctx.inplace_backward = inplace_backward
        return losses, z_losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_of_z: Any) -> Any:
        logits, lse, labels = ctx.saved_tensors
        grads = logits if ctx.inplace_backward else torch.empty_like(logits)
        _kernel((grads, grad, logits, lse, labels))
        return grads, None, None, None


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> Any:
    """The losses and the z-losses of logits [rows, classes]."""
    usable = logit_scale == 1.0 and label_smoothing == 0.0
    return CrossEntropyLoss.apply(logits, labels, precomputed_lse if usable else None, inplace_backward)
