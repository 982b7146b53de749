"""From gradients to new weights: clipping, and no update from a loss or gradients that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.training.loop.precision import Precision


@dataclass(frozen=True)
class Update:
    """norm: of all gradients, before clipping; None where it was not asked for. doubt: on the device, nan
    where the loss, or the norm that was looked at, is not finite, so that the step was not made; else 0."""

    norm: Tensor | None
    doubt: Tensor


def with_own_kernels(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's saved state, to be gone on with by this one's kernels: a run may change its device."""
    groups = [
        {**saved, **{name: own[name] for name in ("fused", "foreach") if name in own}}
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state, "param_groups": groups}


class Updates:
    """One optimizer step at a time.

    A fused optimizer decides on the device whether it steps, so the host need not wait for the answer.
    Others are asked to step after the host has looked. One that updates in backward has stepped already:
    `doubt` then only tells that it should not have.
    """

    def __init__(
        self, optimizer: Optimizer, trained: Sequence[Tensor], clip: float | None, precision: Precision
    ) -> None:
        self.optimizer, self.trained, self.clip, self.precision = optimizer, list(trained), clip, precision
        self.in_backward = bool(getattr(optimizer, "updates_in_backward", False))
        self.under_way = False  # true in a step, and after one that failed half way
        if self.in_backward and (clip is not None or precision.scaler is not None):
            what = "training.clip" if clip is not None else "training.autocast=float16, which scales them"
            raise UserError(f"updates are made in backward, so no gradients are left for {what}")
        self._decides_itself = bool(
            precision.scaler is None and getattr(optimizer, "_step_supports_amp_scaling", False)
        )

    def step(self, loss: Tensor) -> Update:
        doubt = loss - loss  # one small kernel, where isfinite starts four
        if self.in_backward:
            self.optimizer.step()
            return Update(None, doubt)
        self.precision.unscale(self.optimizer)
        norm = None
        if self.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.trained, self.clip)
            if self.precision.scaler is None:  # a scaler leaves such a step out by itself, and goes on
                doubt = doubt + (norm - norm)
        self.under_way = True
        if self._decides_itself:
            self.optimizer.found_inf = torch.nan_to_num(doubt.float(), nan=1.0)  # type: ignore[attr-defined]
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.step()
        elif doubt == 0:
            self.precision.step(self.optimizer)
        else:
            self.precision.leave_out()
        self.under_way = False
        return Update(norm, doubt)
