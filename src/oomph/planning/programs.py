"""What fit predicts: a Workload, a function or a script, as it is and with fixes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from oomph.errors import OomphError, UserError
from oomph.fixes.application import apply
from oomph.fixes.modules import model_id
from oomph.fixes.registry import FixContext, all_fixes, conflict
from oomph.fixes.scripts import ModelChange, on_each_optimizer, propose_for
from oomph.gpus import GPU
from oomph.planning.reduced import Reduction, reduction
from oomph.prediction import Script, predict
from oomph.prediction.api import silently
from oomph.prediction.isolation import finish, run_forked, run_isolated
from oomph.records import FixUse, Prediction, Proposal
from oomph.workload import Workload

Fixes = tuple[FixUse, ...]


class Proposals(NamedTuple):
    """The fixes that apply to a program's model."""

    model_id: str = ""
    found: tuple[Proposal, ...] = ()
    reason: str = ""  # why there are none


class WorkloadProgram:
    """Predicts a Workload with fixes. Runs in an isolated process, whose forks have all that it imported."""

    reduction: Reduction | None = None  # known after `proposals`

    def __init__(self, workload: Workload, card: GPU, limit: int) -> None:
        self._workload = workload
        self._predict = functools.partial(predict, gpu=card, max=limit)

    def predict(self) -> Prediction:
        return self._predict(self._workload)

    def predict_with(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        """(position, prediction or why there is none), as they come."""

        return self._predict_all(self._workload, sets)

    def predict_reduced(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        assert self.reduction is not None
        return self._predict_all(self.reduction.workload(self._workload), sets)

    def _predict_all(
        self, workload: Workload, sets: Sequence[Fixes]
    ) -> Iterator[tuple[int, Prediction | Exception]]:
        def predicted(fixes: Fixes) -> Prediction:
            return self._predict(apply(list(fixes), workload))

        return run_forked([functools.partial(predicted, fixes) for fixes in sets], _jobs())

    def proposals(self, prediction: Prediction) -> Proposals:
        context = FixContext(prediction, self._workload)
        found = [
            proposal
            for fix in all_fixes()
            if fix.name != "fsdp2"  # needs more than one GPU
            for proposal in fix.proposals(context)
            if not any(conflict(proposal.use, use) for use in self._workload.fixes)
        ]
        self.reduction = reduction(context.model)
        return Proposals(model_id(context.model), tuple(found))


class FunctionProgram:
    """Predicts a function that sets up and returns the step, with fixes of its model. Isolated, too."""

    def __init__(self, function: Callable[[], Any], card: GPU, limit: int) -> None:
        self._function = function
        self._predict = functools.partial(predict, gpu=card, max=limit)

    def predict(self) -> Prediction:
        return self._predict(self._function)

    def predict_with(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        changes = [self._calling(ModelChange(fixes)) for fixes in sets]
        return run_forked([functools.partial(self._predict, change) for change in changes], _jobs())

    def proposals(self, prediction: Prediction) -> Proposals:
        def propose(optimizer: Any) -> None:
            raise _Proposals(_proposals_for(prediction, optimizer))

        ((_, found),) = run_forked([functools.partial(self._predict, self._calling(propose))], 1)
        if isinstance(found, _Proposals):
            return found.found
        if isinstance(found, UserError):  # nothing can be applied
            return Proposals(reason=str(found))
        if isinstance(found, Exception):
            raise found
        return Proposals(reason="the function made no optimizer of torch.optim")

    def _calling(self, call: Callable[[Any], None]) -> Callable[[], Any]:
        """The function, with a call for each optimizer that it makes."""

        def function() -> Any:
            with on_each_optimizer(call):
                return self._function()

        return function


class ScriptProgram:
    """Predicts a script with fixes of its model, each time in a process of its own."""

    def __init__(self, script: Script, card: GPU, limit: int) -> None:
        self._script = script
        self._predict = functools.partial(predict, gpu=card, max=limit)

    def predict(self) -> Prediction:
        return self._predict(self._script)

    def predict_with(self, sets: Sequence[Fixes]) -> Iterator[tuple[int, Prediction | Exception]]:
        for number, fixes in enumerate(sets):
            fixed = replace(self._script, on_optimizer=ModelChange(fixes))
            try:
                yield number, self._run_silently(fixed)
            except OomphError as error:
                yield number, error

    def proposals(self, prediction: Prediction) -> Proposals:
        """The script runs until it makes its optimizer."""
        asked = replace(
            self._script, on_optimizer=lambda optimizer: finish(_proposals_for(prediction, optimizer))
        )
        try:
            found: Proposals = self._run_silently(asked)
        except UserError as error:
            return Proposals(reason=str(error).removeprefix("no fix was applied: "))
        return found

    def _run_silently(self, script: Script) -> Any:
        """Without the script's output, which the first prediction has shown."""
        run = functools.partial(silently, lambda progress: self._predict(script))
        return run_isolated(run, lambda text, fraction: None)


def _jobs() -> int:
    """Predictions at a time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Proposals(OomphError):
    """Ends a function that was called for its proposals alone."""

    @property
    def found(self) -> Proposals:
        return self.args[0]


def _proposals_for(prediction: Prediction, made: Any) -> Proposals:
    model, found = propose_for(made, prediction)
    return Proposals(model_id(model), tuple(found))


Program = WorkloadProgram | FunctionProgram | ScriptProgram
