"""The optimizer's step parameter by parameter: temporaries of one parameter's size, not of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import is_fused, kind_of, optimizer_of, with_converted_optimizer
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload


class NoForeach(Fix):
    name = "no_foreach"
    kind = "exact"
    changes = (
        "The optimizer goes parameter by parameter, so that its temporaries are one parameter's; slower."
    )

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = optimizer_of(context)
        if optimizer is not None and not is_fused(optimizer) and _why_not(optimizer) is None:
            yield Target(("optimizer",), {}, "many small kernels: slow where parameters are many and small")

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        return with_converted_optimizer(workload, self.name, partial(_one_by_one, fix=self.name))


def _one_by_one(optimizer: Optimizer, *, fix: str) -> Optimizer:
    if is_fused(optimizer):  # which has no temporaries
        return optimizer
    why = _why_not(optimizer)
    if why is not None:
        raise UserError(f"fix {fix!r}: {why}")
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings["foreach"] = False
    return optimizer


def _why_not(optimizer: Optimizer) -> str | None:
    if not all("foreach" in group for group in optimizer.param_groups):
        return f"{kind_of(optimizer)} has no foreach option"
    if all(group["foreach"] is False for group in optimizer.param_groups):
        return f"{kind_of(optimizer)} goes parameter by parameter already"
    return None
