"""Convert the optimizer that a workload's factory makes.

The converted optimizer keeps the original's parameter groups (the same dictionaries, so schedulers that the
factory bound to them keep working), its hyperparameters, its state and its hooks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from oomph.errors import UserError
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

Convert = Callable[[Optimizer], Optimizer]


@dataclass(frozen=True)
class ConvertedOptimizer:
    """An optimizer factory: makes an optimizer, then converts it."""

    make: Callable[[Iterable[torch.Tensor]], Optimizer]
    convert: Convert

    def __call__(self, params: Iterable[torch.Tensor]) -> Optimizer:
        return self.convert(self.make(params))


def with_converted_optimizer(workload: Workload, fix: str, convert: Convert) -> Workload:
    """`convert`: a module-level function, or a partial of one."""
    if workload.optimizer is None:
        raise UserError(f"fix {fix!r}: the workload has no optimizer (optimizer=None)")
    return replace(workload, optimizer=ConvertedOptimizer(workload.optimizer, convert))


def mark_as_stepped(original: Optimizer) -> None:
    """Keep a scheduler that is bound to `original` from warning that its step() was never called."""
    original._opt_called = True  # type: ignore[attr-defined]


def move_hooks(original: Optimizer, new: Optimizer) -> None:
    """Step hooks run around the new optimizer's step, once; state_dict hooks apply to both.

    The same dictionaries are used, so that the handles which users hold still remove their hooks.
    """
    for name in (*_STEP_HOOKS, *_STATE_DICT_HOOKS):
        setattr(new, name, getattr(original, name))
    for name in _STEP_HOOKS:
        setattr(original, name, OrderedDict())


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kind_of(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def hyperparameter(group: dict[str, Any], key: str, fix: str) -> float:
    """A hyperparameter as a number. Reading one from the GPU would synchronize, so it is refused."""
    value = group[key]
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UserError(f"fix {fix!r}: {key} is a tensor on {value.device}; give a number")
        value = value.item()
    return float(value)


def check_independent_updates(optimizer: Optimizer, fix: str, independent: bool) -> None:
    """UserError unless each parameter's update depends on that parameter alone.

    `independent`: the user says so of an optimizer that is not torch's own.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(f"fix {fix!r}: LBFGS needs all gradients at once, so it cannot step one by one")
    if getattr(optimizer, "updates_in_backward", False):
        raise UserError(f"fix {fix!r}: {kind_of(optimizer)} already updates in backward")
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        raise UserError(f"fix {fix!r}: the optimizer has step pre-hooks, which need all gradients")
    known = [getattr(torch.optim, name, None) for name in _INDEPENDENT]
    if independent or type(optimizer) in known or getattr(optimizer, "updates_are_independent", False):
        return
    raise UserError(
        f"fix {fix!r}: {kind_of(optimizer)} is not known to update each parameter independently; "
        "if it does, give independent=true"
    )
