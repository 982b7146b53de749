"""Fixes for a program that is not a Workload: they are applied where the program makes its optimizer.

Then the model exists and has not run. Its parameters keep their identity, so the optimizer still has them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.application import apply_to_model, changes_in, undo
from oomph.fixes.registry import Fix, FixContext, all_fixes
from oomph.records import FixUse, Prediction, Proposal

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def fixes_for_scripts() -> list[Fix]:
    """Those that change the model alone; a script's batch, loss and optimizer are its own."""
    return [
        fix
        for fix in all_fixes()
        if fix.changes_model and type(fix).change_workload is Fix.change_workload and fix.name != "fsdp2"
    ]


def check_for_scripts(uses: Sequence[FixUse]) -> None:
    valid = [fix.name for fix in fixes_for_scripts()]
    for use in uses:
        if use.fix not in valid:
            raise UserError(
                f"fix {use.fix!r} changes the step, not the model, and cannot be applied to a script; "
                f"those that can are {', '.join(valid)}"
            )


class ModelChange:
    """Called with every optimizer that a program makes: applies fixes to the model that it trains, once."""

    def __init__(self, uses: Sequence[FixUse], report: Callable[[str], None] = lambda text: None) -> None:
        self._uses, self._report = uses, report
        self.changed: list[nn.Module] = []

    def __call__(self, optimizer: Optimizer) -> None:
        model = trained_model(optimizer)
        if any(model is each for each in self.changed):
            return
        parameters = set(map(id, model.parameters()))
        try:
            apply_to_model(self._uses, model)
        except UserError:
            if self.changed:  # a second model, such as a discriminator, to which they do not apply
                return
            raise
        if set(map(id, model.parameters())) != parameters:
            undo(model)
            names = ", ".join(use.fix for use in self._uses)
            raise UserError(f"{names}: the model would get parameters that the optimizer does not have")
        self.changed.append(model)
        for use in self._uses:
            where = [change.where for change in changes_in(model) if change.fix == use.fix]
            self._report(f"{use.fix}: {len(where)} changes in {type(model).__name__}")


@contextlib.contextmanager
def on_each_optimizer(call: Callable[[Optimizer], None]) -> Iterator[None]:
    """Call it with every optimizer that is made inside, as soon as it has its parameters."""
    make = Optimizer.__init__

    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        call(optimizer)

    Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Optimizer.__init__ = make  # type: ignore[method-assign]


def propose_for(model: nn.Module, prediction: Prediction) -> list[Proposal]:
    """The fixes that apply to a script's model, without predicted saving."""
    context = FixContext(prediction, None)  # type: ignore[arg-type]  # there is no Workload
    vars(context)["model"] = model
    found: list[Proposal] = []
    for fix in fixes_for_scripts():
        if fix.name != "gradient_accumulation_fusion":  # whether the script accumulates is not known
            found += fix.proposals(context)
    return found


def trained_model(optimizer: Optimizer) -> nn.Module:
    """The outermost module that has the optimizer's parameters; of a data-parallel wrapper, its module."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    gc.unfreeze()  # in a prediction's process, objects of before are frozen, and not listed
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    own = [each for each in modules if not wanted.isdisjoint(map(id, each.parameters()))]
    inside = {id(child) for each in own for child in each.modules() if child is not each}
    outermost = [each for each in own if id(each) not in inside]
    if not outermost:
        raise UserError("no module has the parameters of the script's optimizer, so no fix can be applied")
    model = max(outermost, key=lambda each: sum(id(p) in wanted for p in each.parameters()))
    while isinstance(model, _WRAPPERS):
        model = model.module
    return model
