"""Losses of logits that are not there: F.cross_entropy and F.nll_loss by linear_cross_entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.fixes.logits.record import Later
from oomph.ops.common import autocast_enabled, can_accumulate_into_grad
from oomph.ops.cross_entropy import linear_cross_entropy
from oomph.ops.cross_entropy.api import REDUCTIONS

_EXACT = 1e-12  # a cap is divided by and multiplied with: 1 / 30 * 30 need not be 1


def _cross_entropy(
    deferred: Later,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """As F.cross_entropy; None where only the logits will do, and for every mistake, which torch tells."""
    if size_average is not None or reduce is not None or deferred.meaning.normalized:
        return None
    return _loss(deferred, target, weight, ignore_index, reduction, label_smoothing)


def _nll_loss(
    deferred: Later,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor | None:
    """As F.nll_loss, of a log-softmax."""
    if size_average is not None or reduce is not None or not deferred.meaning.normalized:
        return None
    return _loss(deferred, target, weight, ignore_index, reduction, 0.0)


def _loss(
    deferred: Later,
    target: Any,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor | None:
    source, meaning = deferred.source, deferred.meaning
    if not _takes(deferred, target, class_weight):
        return None
    if reduction not in REDUCTIONS or type(ignore_index) is not int or not 0.0 <= label_smoothing <= 1.0:
        return None
    cap = meaning.post if meaning.capped else None
    if cap is not None and not (cap > 0 and math.isfinite(cap)):
        return None
    factor = meaning.factor if cap is None else meaning.factor * cap
    hidden: Tensor = meaning.hidden
    bias: Tensor | None = source.bias
    recording = deferred.recording and torch.is_grad_enabled()
    with torch.set_grad_enabled(recording):
        if abs(factor - 1.0) > _EXACT:
            # On the hidden state, which is narrower than the logits; rounded as often.
            hidden, bias = hidden * factor, None if bias is None else bias * factor
        with source.under_its_autocast():
            loss = linear_cross_entropy(
                hidden,
                source.weight,
                target,
                bias=bias,
                reduction=reduction,
                ignore_index=ignore_index,
                label_smoothing=float(label_smoothing),
                softcap=cap,
                class_weight=class_weight,
                accumulate_into_grad=source.into_grad and can_accumulate_into_grad(source.weight),
                memory_budget=source.memory_budget,
            )
        assert isinstance(loss, Tensor)
        if reduction == "mean":
            # torch's mean over no targets is NaN, and its gradient 0; so is this one.
            loss = torch.where((target != ignore_index).any(), loss, torch.nan)
        return loss.to(_loss_dtype(deferred))


def _takes(deferred: Later, target: Any, class_weight: Tensor | None) -> bool:
    """Class numbers of the right shape in the same place; weights that torch would take."""
    hidden = deferred.meaning.hidden
    if not isinstance(target, Tensor) or target.dtype != torch.int64 or target.shape != hidden.shape[:-1]:
        return False
    if target.device != hidden.device:
        return False
    if class_weight is None:
        return True
    return (
        class_weight.shape == (deferred.source.weight.shape[0],)
        and class_weight.device == hidden.device
        and class_weight.dtype == _loss_dtype(deferred)
        and not class_weight.requires_grad
    )


def _loss_dtype(deferred: Later) -> torch.dtype:
    """The logits' dtype; under autocast, torch computes losses in fp32."""
    dtype = deferred.meaning.dtype
    if autocast_enabled(deferred.source.hidden) and dtype != torch.float64:
        return torch.float32
    return dtype


LOSSES: dict[Any, Callable[..., Tensor | None]] = {F.cross_entropy: _cross_entropy, F.nll_loss: _nll_loss}
