"""The optimizer's step as one kernel over all parameters, without temporaries."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import (
    is_fused,
    kind_of,
    optimizer_of,
    parameters_of,
    with_converted_optimizer,
)
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload

_KINDS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class FusedOptimizer(Fix):
    name = "fused_optimizer"
    kind = "exact"
    changes = "The optimizer's step is one kernel over many parameters at once, which needs no temporaries."
    excludes: ClassVar = {"no_foreach": "a fused step needs no temporaries already"}

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = optimizer_of(context)
        if optimizer is not None and not is_fused(optimizer) and _why_not(optimizer) is None:
            yield Target(("optimizer",))

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        return with_converted_optimizer(workload, self.name, partial(_fused, fix=self.name))


def _fused(optimizer: Optimizer, *, fix: str) -> Optimizer:
    """The very object with its flags set, as its constructor would have done."""
    if is_fused(optimizer):
        return optimizer
    why = _why_not(optimizer)
    if why is not None:
        raise UserError(f"fix {fix!r}: {why}")
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=False)
    optimizer._step_supports_amp_scaling = type(optimizer) is not torch.optim.Adagrad  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    for parameter, state in optimizer.state.items():
        # A fused step counts on the parameters' own device.
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(parameter.device, torch.float32)
    return optimizer


def _why_not(optimizer: Optimizer) -> str | None:
    if type(optimizer) not in _KINDS:
        valid = ", ".join(kind.__name__ for kind in _KINDS)
        return f"torch has no fused step for {kind_of(optimizer)}; valid: {valid}"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind_of(optimizer)} with differentiable=True cannot be fused"
    if not all(parameter.is_floating_point() for parameter in parameters_of(optimizer)):
        return "some parameters are not of a float dtype"
    return None
