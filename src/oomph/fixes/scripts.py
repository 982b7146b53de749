"""Fixes for a program that is not a Workload: they are applied where the program makes its optimizer.

Then the model exists and has not run. Its parameters keep their identity, so the optimizer still has them.
A program that makes no optimizer of torch.optim gets them when it first calls its model to train it.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.application import apply_to_model, changes_in, undo
from oomph.fixes.modules import check_model_id
from oomph.fixes.optimizers.conversion import FusedOptimizer, NoForeach, OptimizerFix
from oomph.fixes.registry import Fix, FixContext, all_fixes, find
from oomph.fixes.workload_settings import Allocator
from oomph.prediction.program import on_first_training_call
from oomph.prediction.trainers import TrainingLoop, on_each_training_loop
from oomph.records import FixUse, Prediction, Proposal
from oomph.units import counted
from oomph.workload import ALLOCATOR_VARIABLES, ignored_allocator, set_allocator

Made = Optimizer | nn.Module | TrainingLoop  # by a program
_ALLOCATOR = ALLOCATOR_VARIABLES[0]
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_IN_PLACE = (FusedOptimizer, NoForeach)  # which set options of the optimizer that the script made


def fixes_for_scripts() -> list[Fix]:
    """Those that change the model alone, options of the optimizer, arguments of a Trainer, or settings of the
    allocator.

    Without a Trainer the batch and the loss are computed by lines of the script. Another optimizer would need
    its name in the script to mean another object, and updates in backward would run before the script clips
    gradients.
    """
    return [
        fix
        for fix in all_fixes()
        if isinstance(fix, (*_IN_PLACE, Allocator))
        or fix.changes_loop
        or (fix.changes_model and type(fix).change_workload is Fix.change_workload and fix.name != "fsdp2")
    ]


def check_for_scripts(uses: Sequence[FixUse], is_function: bool = False) -> None:
    valid = [fix.name for fix in fixes_for_scripts()]
    for use in uses:
        if use.fix == Allocator.name and is_function:
            raise UserError(
                "fix 'allocator' cannot be applied to a function: set the environment variable "
                f"{_ALLOCATOR}, which oomph reads, too"
            )
        if use.fix not in valid:
            raise UserError(
                f"fix {use.fix!r} changes the step, not the model, and cannot be applied to a script; "
                f"those that can are {', '.join(valid)}"
            )


def set_allocator_for(uses: Sequence[FixUse]) -> None:
    """To be called before the program uses CUDA."""
    settings = _allocator_settings(uses)
    if settings is not None:
        os.environ[_ALLOCATOR] = settings
        if torch.cuda.device_count():  # torch has read the variable
            set_allocator(settings)


def _allocator_settings(uses: Sequence[FixUse]) -> str | None:
    for use in uses:
        if isinstance(fix := find(use.fix), Allocator):
            return fix.settings(**use.options)
    return None


class ModelChange:
    """Called with every optimizer that a program makes, or with its model, and with the loops of its
    Trainers: applies fixes to the model, once, to the optimizers, and to the arguments of the Trainers. The
    allocator's settings it sets for predictions, which read them at their end."""

    def __init__(self, uses: Sequence[FixUse], report: Callable[[str], None] = lambda text: None) -> None:
        self._allocator = _allocator_settings(uses)
        self._of_optimizer = [use for use in uses if isinstance(find(use.fix), OptimizerFix)]
        self._of_loop = [use for use in uses if find(use.fix).changes_loop]
        others = (*self._of_optimizer, *self._of_loop, *(use for use in uses if use.fix == Allocator.name))
        self._of_model = [use for use in uses if use not in others]
        self._report = report
        self.changed: list[nn.Module] = []
        self._has_loop = False

    def __call__(self, made: Made) -> None:
        if isinstance(made, TrainingLoop):
            self._change_loop(made)
            return
        if self._of_loop and not self._has_loop:
            names = ", ".join(use.fix for use in self._of_loop)
            raise UserError(
                f"{names}: no Trainer of transformers or Lightning made this optimizer; in its own loop, "
                "the script has to make the batch smaller and accumulate the gradients of several passes"
            )
        if self._allocator is not None:
            os.environ[_ALLOCATOR] = self._allocator
        model = model_of(made)
        is_first = not self.changed
        if is_first and self._allocator is not None and (ignored := ignored_allocator()):
            self._report(f"allocator: {_ALLOCATOR}={self._allocator}{ignored}")
        try:
            if not any(model is each for each in self.changed):
                self._change_model(model)
            if isinstance(made, Optimizer):
                for use in self._of_optimizer:
                    find(use.fix).convert_checked(made)  # type: ignore[attr-defined]
                    self._report(f"{use.fix}: {type(made).__name__}")
        except UserError:
            if is_first:
                raise
            # A second model or optimizer, as of a discriminator, to which they do not apply.

    def _change_loop(self, loop: TrainingLoop) -> None:
        self._has_loop = True
        for use in self._of_loop:
            check_model_id(use.model_id, unwrapped(loop.model))
            self._report(f"{use.fix}: {find(use.fix).change_loop(loop, **use.options)}")

    def _change_model(self, model: nn.Module) -> None:
        parameters = set(map(id, model.parameters()))
        for use in self._of_optimizer:
            check_model_id(use.model_id, model)
        apply_to_model(self._of_model, model)
        if set(map(id, model.parameters())) != parameters:
            undo(model)
            names = ", ".join(use.fix for use in self._of_model)
            raise UserError(f"{names}: the model would get parameters that the optimizer does not have")
        self.changed.append(model)
        for use in self._of_model:
            where = [change.where for change in changes_in(model) if change.fix == use.fix]
            self._report(f"{use.fix}: {counted(len(where), 'change')} in {type(model).__name__}")


@contextlib.contextmanager
def on_each_optimizer(call: Callable[[Any], None]) -> Iterator[None]:
    """Call it with every optimizer that is made inside, as soon as it has its parameters; or with the first
    model that is trained before any; and before, with each loop of a Trainer."""
    make = Optimizer.__init__

    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        forward.remove()
        call(optimizer)

    forward = on_first_training_call(call)
    Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        with on_each_training_loop(call):
            yield
    finally:
        forward.remove()
        Optimizer.__init__ = make  # type: ignore[method-assign]


def propose_for(
    made: Optimizer | nn.Module, prediction: Prediction, is_script: bool, loop: TrainingLoop | None = None
) -> tuple[nn.Module, list[Proposal]]:
    """The model that a program trains, and the fixes that apply to it, without predicted saving. A function
    may be called when CUDA has started, too late to set the allocator."""
    optimizer = made if isinstance(made, Optimizer) else None
    model = model_of(made)
    context = FixContext(prediction, None, loop)  # type: ignore[arg-type]  # there is no Workload
    vars(context).update(model=model, optimizer=optimizer)
    found: list[Proposal] = []
    for fix in fixes_for_scripts():
        if fix.changes_loop and loop is None:
            continue
        # Whether the script accumulates is not known.
        if fix.name != "gradient_accumulation_fusion" and (is_script or fix.name != Allocator.name):
            found += fix.proposals(context)
    return model, found


def model_of(made: Made) -> nn.Module:
    if isinstance(made, TrainingLoop):
        return unwrapped(made.model)
    return trained_model(made) if isinstance(made, Optimizer) else unwrapped(made)


def trained_model(optimizer: Optimizer) -> nn.Module:
    """The outermost module that has the optimizer's parameters, without its wrapper."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found, count = _outermost_module(wanted)
    if count < len(wanted):
        gc.unfreeze()  # in a prediction's process, objects of before are frozen, and not listed
        found, count = _outermost_module(wanted)
    if found is None:
        raise UserError("no module has the parameters of the script's optimizer, so no fix can be applied")
    return unwrapped(found)


def _outermost_module(wanted: set[int]) -> tuple[nn.Module | None, int]:
    """The module with the most of these parameters, and how many it has; of nested ones the outermost."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    own = [each for each in modules if not wanted.isdisjoint(map(id, each.parameters()))]
    inside = {id(child) for each in own for child in each.modules() if child is not each}
    outermost = [each for each in own if id(each) not in inside]
    counts = [sum(id(p) in wanted for p in each.parameters()) for each in outermost]
    return max(zip(outermost, counts, strict=True), key=lambda pair: pair[1], default=(None, 0))


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers and torch.compile, which compiles it at its first call."""
    while True:
        if isinstance(model, _WRAPPERS):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model
