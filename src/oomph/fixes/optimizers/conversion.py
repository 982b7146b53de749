"""Fixes that convert the optimizer which a workload's factory makes; those that set one option of it.

A converted optimizer keeps the original's parameter groups (the same dictionaries, so schedulers that the
factory bound to them keep working), its hyperparameters, its state and its hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.records import Prediction
from oomph.workload import Workload

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STATE_DICT_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# torch's optimizers whose update of a parameter depends on that parameter alone: all but LBFGS.
_INDEPENDENT = (
    "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD SparseAdam".split()
)
FUSED_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass(frozen=True)
class ConvertedOptimizer:
    """An optimizer factory: makes an optimizer, then converts it."""

    make: Callable[[Iterable[torch.Tensor]], Optimizer]
    convert: Callable[[Optimizer], Optimizer]

    def __call__(self, params: Iterable[torch.Tensor]) -> Optimizer:
        return self.convert(self.make(params))


class OptimizerFix(Fix):
    """Base class. A subclass overrides `convert` and `why_not`, and `change_workload` if it has options."""

    note: ClassVar[str] = ""  # of its proposal

    def why_not(self, optimizer: Optimizer, **options: Any) -> str | None:
        """Why this optimizer cannot be converted, in one line."""
        return None

    def convert(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        raise NotImplementedError

    def targets(self, context: FixContext) -> Iterable[Target]:
        if context.optimizer is not None and self.why_not(context.optimizer) is None:
            yield Target(("optimizer",), {}, self.note)

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        return self.converting(workload)

    def converting(self, workload: Workload, **options: Any) -> Workload:
        """The workload with an optimizer that is converted when it is made."""
        if workload.optimizer is None:
            raise UserError(f"fix {self.name!r}: the workload has no optimizer (optimizer=None)")
        convert = partial(self.convert_checked, **options)
        return replace(workload, optimizer=ConvertedOptimizer(workload.optimizer, convert))

    def convert_checked(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        """UserError where it cannot be converted."""
        why = self.why_not(optimizer, **options)
        if why is not None:
            raise UserError(f"fix {self.name!r}: {why}")
        return self.convert(optimizer, **options)


class ReplacingOptimizer(Optimizer):
    """Steps in the place of another optimizer: with its parameter groups, hyperparameters and hooks.

    Step hooks run around this one's step, once; state_dict hooks apply to both. The dictionaries of hooks are
    the same, so that the handles which users hold still remove them.
    """

    def __init__(self, original: Optimizer) -> None:
        super().__init__(original.param_groups, original.defaults)
        original._opt_called = True  # type: ignore[attr-defined]  # else a scheduler that is bound to it warns
        for name in (*_STEP_HOOKS, *_STATE_DICT_HOOKS):
            setattr(self, name, getattr(original, name))
        for name in _STEP_HOOKS:
            setattr(original, name, OrderedDict())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.update_parameters()
        return loss

    def update_parameters(self) -> None:
        raise NotImplementedError


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kind_of(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def hyperparameter(group: dict[str, Any], key: str, fix: str) -> float:
    """A hyperparameter as a number. Reading one from the GPU would synchronize, so it is refused."""
    value = group[key]
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UserError(f"fix {fix!r}: {key} is a tensor on {value.device}; give a number")
        value = value.item()
    return float(value)


def why_not_independent(optimizer: Optimizer, independent: bool) -> str | None:
    """Why a parameter's update may depend on other parameters; None where it does not.

    `independent`: the user says so of an optimizer that is not torch's own.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS needs all gradients at once, so it cannot step one by one"
    if getattr(optimizer, "updates_in_backward", False):
        return f"{kind_of(optimizer)} already updates in backward"
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return "the optimizer has step pre-hooks, which need all gradients"
    known = [getattr(torch.optim, name, None) for name in _INDEPENDENT]
    if independent or type(optimizer) in known or getattr(optimizer, "updates_are_independent", False):
        return None
    return (
        f"{kind_of(optimizer)} is not known to update each parameter independently; "
        "if it does, give independent=true"
    )


# ------------------------------------------------------------------------------------------ one option


class FusedOptimizer(OptimizerFix):
    name = "fused_optimizer"
    kind = "exact"
    changes = "The optimizer's step is one kernel over many parameters at once, which needs no temporaries."
    excludes: ClassVar = {"no_foreach": "a fused step has no temporaries"}

    def targets(self, context: FixContext) -> Iterable[Target]:
        return [] if _is_fused(context.optimizer) else super().targets(context)

    def why_not(self, optimizer: Optimizer, **options: Any) -> str | None:
        if type(optimizer) not in FUSED_KINDS:
            valid = ", ".join(kind.__name__ for kind in FUSED_KINDS)
            return f"torch has no fused step for {kind_of(optimizer)}; valid: {valid}"
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return f"{kind_of(optimizer)} with differentiable=True cannot be fused"
        if not all(parameter.is_floating_point() for parameter in parameters_of(optimizer)):
            return "some parameters are not of a float dtype"
        return None

    def convert(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        """The same object with the flags that its constructor sets for fused=True."""
        if _is_fused(optimizer):
            return optimizer
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings.update(fused=True, foreach=False)
        optimizer._step_supports_amp_scaling = type(optimizer) is not torch.optim.Adagrad  # type: ignore[attr-defined]
        optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
        for parameter, state in optimizer.state.items():
            # A fused step keeps its counter on the parameter's device.
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(parameter.device, torch.float32)
        return optimizer


def _is_fused(optimizer: Optimizer | None) -> bool:
    return optimizer is not None and all(group.get("fused") for group in optimizer.param_groups)


class NoForeach(OptimizerFix):
    name = "no_foreach"
    kind = "exact"
    changes = "The optimizer updates one parameter at a time, so its temporaries are one parameter's; slower."
    note = "many small kernels: slow where parameters are many and small"

    def targets(self, context: FixContext) -> Iterable[Target]:
        return [] if _is_fused(context.optimizer) else super().targets(context)

    def why_not(self, optimizer: Optimizer, **options: Any) -> str | None:
        if not all("foreach" in group for group in optimizer.param_groups):
            return f"{kind_of(optimizer)} has no foreach option"
        slow = all(group["foreach"] is False for group in optimizer.param_groups)
        if slow and not _is_fused(optimizer):
            return f"{kind_of(optimizer)} already updates one parameter at a time"
        return None

    def convert(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        if not _is_fused(optimizer):  # which has no temporaries
            for settings in (optimizer.defaults, *optimizer.param_groups):
                settings["foreach"] = False
        return optimizer


class SetToNone(OptimizerFix):
    name = "set_to_none"
    kind = "exact"
    changes = "optimizer.zero_grad() frees the gradients instead of filling them with zeros."
    note = "a parameter without a gradient in a step is not updated in it"

    def targets(self, context: FixContext) -> Iterable[Target]:
        must_stay = getattr(context.workload.optimizer, "gradients_must_stay", False)
        return super().targets(context) if not must_stay and _gradients_left(context.prediction) else []

    def convert(self, optimizer: Optimizer, **options: Any) -> Optimizer:
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
