"""A workload's optimizer, built by its own factory and then converted.

What the factory made decides: its parameter groups (the very dictionaries, so that a scheduler which the
factory bound to them goes on working), its hyperparameters and its state are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.registry import FixContext
from oomph.workload import Workload

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

Convert = Callable[[Optimizer], Optimizer]


@dataclass(frozen=True)
class Converted:
    """Makes an optimizer, then converts it."""

    make: Callable[[Iterable[torch.Tensor]], Optimizer]
    convert: Convert

    def __call__(self, params: Iterable[torch.Tensor]) -> Optimizer:
        return self.convert(self.make(params))


def with_converted_optimizer(workload: Workload, fix: str, convert: Convert) -> Workload:
    """`convert`: a function of a module, or a partial of one."""
    if workload.optimizer is None:
        raise UserError(f"fix {fix!r}: the workload has no optimizer (optimizer=None)")
    return replace(workload, optimizer=Converted(workload.optimizer, convert))


def takes_the_place_of(made: Optimizer) -> None:
    """A scheduler that the factory bound to `made` need not remind the user to call its step."""
    made._opt_called = True  # type: ignore[attr-defined]


def takes_over_hooks(new: Optimizer, made: Optimizer) -> None:
    """Hooks around a step run around `new`'s, once; those of state_dict() are for both.

    The very dictionaries, so that the handles which registering gave out go on removing from them.
    """
    for name in (*_STEP_HOOKS, *_STATE_HOOKS):
        setattr(new, name, getattr(made, name))
    for name in _STEP_HOOKS:
        setattr(made, name, OrderedDict())


def is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def optimizer_of(context: FixContext) -> Optimizer | None:
    """The optimizer that the workload makes, over stand-ins for its parameters; None where there is none."""
    if context.workload.optimizer is None:
        return None
    stand_ins = [
        nn.Parameter(
            torch.empty(p.shape, dtype=dtype_of(context.workload, p), device="meta"), p.requires_grad
        )
        for p in context.model.parameters()
    ]
    try:
        return context.workload.optimizer(iter(stand_ins))
    except Exception:  # a factory that needs data, or that fails: the prediction has told what is wrong
        return None


def dtype_of(workload: Workload, parameter: torch.Tensor) -> torch.dtype:
    """Of a parameter once the model is where the workload wants it."""
    if workload.dtype is None or not parameter.is_floating_point():
        return parameter.dtype
    assert isinstance(workload.dtype, torch.dtype)
    return workload.dtype


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def kind_of(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def number_in(group: dict[str, Any], key: str, fix: str) -> float:
    """A hyperparameter as a number. One on the GPU cannot be read without waiting for it."""
    value = group[key]
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UserError(f"fix {fix!r}: {key} is a tensor on {value.device}; give a number")
        value = value.item()
    return float(value)
