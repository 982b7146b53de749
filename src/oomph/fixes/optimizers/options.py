"""Fixes that set one option of a torch optimizer: fused, foreach, zero_grad(set_to_none)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import is_fused, kind_of, parameters_of, with_converted_optimizer
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.records import Prediction
from oomph.workload import Workload

_FUSED_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class FusedOptimizer(Fix):
    name = "fused_optimizer"
    kind = "exact"
    changes = "The optimizer's step is one kernel over many parameters at once, which needs no temporaries."
    excludes: ClassVar = {"no_foreach": "a fused step has no temporaries"}

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = context.optimizer
        if optimizer is not None and not is_fused(optimizer) and _why_not_fused(optimizer) is None:
            yield Target(("optimizer",))

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        return with_converted_optimizer(workload, self.name, partial(_fused, fix=self.name))


def _fused(optimizer: Optimizer, *, fix: str) -> Optimizer:
    """The same object with the flags that its constructor sets for fused=True."""
    if is_fused(optimizer):
        return optimizer
    why = _why_not_fused(optimizer)
    if why is not None:
        raise UserError(f"fix {fix!r}: {why}")
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=False)
    optimizer._step_supports_amp_scaling = type(optimizer) is not torch.optim.Adagrad  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    for parameter, state in optimizer.state.items():
        # A fused step keeps its counter on the parameter's device.
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)
    return optimizer


def _why_not_fused(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in _FUSED_KINDS:
        valid = ", ".join(kind.__name__ for kind in _FUSED_KINDS)
        return f"torch has no fused step for {kind_of(optimizer)}; valid: {valid}"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind_of(optimizer)} with differentiable=True cannot be fused"
    if not all(parameter.is_floating_point() for parameter in parameters_of(optimizer)):
        return "some parameters are not of a float dtype"
    return None


class NoForeach(Fix):
    name = "no_foreach"
    kind = "exact"
    changes = "The optimizer updates one parameter at a time, so its temporaries are one parameter's; slower."

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = context.optimizer
        if optimizer is not None and not is_fused(optimizer) and _why_not_for_loop(optimizer) is None:
            yield Target(("optimizer",), {}, "many small kernels: slow where parameters are many and small")

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        return with_converted_optimizer(workload, self.name, partial(_without_foreach, fix=self.name))


def _without_foreach(optimizer: Optimizer, *, fix: str) -> Optimizer:
    if is_fused(optimizer):  # which has no temporaries
        return optimizer
    why = _why_not_for_loop(optimizer)
    if why is not None:
        raise UserError(f"fix {fix!r}: {why}")
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings["foreach"] = False
    return optimizer


def _why_not_for_loop(optimizer: Optimizer) -> str | None:
    if not all("foreach" in group for group in optimizer.param_groups):
        return f"{kind_of(optimizer)} has no foreach option"
    if all(group["foreach"] is False for group in optimizer.param_groups):
        return f"{kind_of(optimizer)} already updates one parameter at a time"
    return None


class SetToNone(Fix):
    name = "set_to_none"
    kind = "exact"
    changes = "optimizer.zero_grad() frees the gradients instead of filling them with zeros."

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = context.workload.optimizer
        if optimizer is None or getattr(optimizer, "gradients_must_stay", False):
            return
        if _gradients_left(context.prediction):
            yield Target(("optimizer",), {}, "a parameter without a gradient in a step is not updated in it")

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        return with_converted_optimizer(workload, self.name, _with_set_to_none)


def _with_set_to_none(optimizer: Optimizer) -> Optimizer:
    optimizer.zero_grad = MethodType(_free_gradients, optimizer)  # type: ignore[method-assign]
    return optimizer


def _free_gradients(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Ignores `set_to_none`: set_to_none=False is what the fix changes."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def _gradients_left(prediction: Prediction) -> bool:
    """Whether gradients are alive after the last step."""
    alive: set[int] = set()
    for event in prediction.events:
        if event.action == "alloc" and prediction.allocations[event.id].kind == "gradient":
            alive.add(event.id)
        elif event.action == "free":
            alive.discard(event.id)
    return bool(alive)
