"""What fit predicts: a Workload, a function or a script, as it is and with fixes."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from oomph.errors import OomphError, UserError
from oomph.fixes.application import apply, with_prediction
from oomph.fixes.modules import model_id
from oomph.fixes.registry import FixContext, all_fixes, conflict
from oomph.fixes.scripts import ModelChange, check_for_scripts, model_of, on_each_optimizer, propose_for
from oomph.fixes.small_copy import checked_proposals
from oomph.fixes.training_changes import SmallerBatch
from oomph.gpus import GPU
from oomph.models.finetuning import FineTuning
from oomph.planning.reduced import Reduction, reduction
from oomph.prediction import Script, predict
from oomph.prediction.child import model_built_once
from oomph.prediction.isolation import (
    ContinueInFork,
    ForkWaits,
    autograd_runs_in_forks,
    cuda_has_started,
    cuda_sees_gpu,
    finish,
    in_fork,
    is_isolated,
    run_forked,
    run_in_new_interpreter,
    run_isolated,
)
from oomph.prediction.program import WATCH_THREAD
from oomph.prediction.retry import run_silently
from oomph.prediction.tracer.batch_sizes import Sizes
from oomph.prediction.trainers import TrainingLoop
from oomph.records import FailedFixes, FixKind, FixUse, Prediction, Progress, Proposal
from oomph.workload import Workload

Fixes = tuple[FixUse, ...]
Found = TypeVar("Found")
Predictions = Iterator[tuple[int, Prediction | Exception]]  # of position, or why there is none, as they come


class Proposals(NamedTuple):
    """The fixes that apply to a program's model."""

    model_id: str = ""
    found: tuple[Proposal, ...] = ()
    reason: str = ""  # why there are none
    failed: tuple[FailedFixes, ...] = ()  # that change what a small copy computes


class WorkloadProgram:
    """Predicts a Workload with fixes. Runs in an isolated process, whose forks have all that it imported."""

    reduction: Reduction | None = None  # known after `proposals`

    def __init__(self, workload: Workload, card: GPU, limit: int) -> None:
        self._workload, self._card, self._limit = workload, card, limit
        self._trace = contextlib.ExitStack()
        self._predict: Callable[[Callable[[Workload], Workload]], Prediction] | None = None

    def predict(self) -> Prediction:
        found = _predict_before_forks(
            lambda: predict(self._workload, gpu=self._card, max=self._limit, search=False)
        )
        self._repeat_first_step = _requests(found, 1) == _requests(found, 2)
        return found

    def search(self, search: Callable[[Progress], Found], progress: Progress) -> Found:
        """`search` predicts with fixes. The model is built for the first prediction alone."""
        with self._trace:
            return search(progress)

    def predict_with(self, sets: Sequence[Fixes]) -> Predictions:
        return self._predict_all(sets, lambda workload: workload)

    def predict_reduced(self, sets: Sequence[Fixes]) -> Predictions:
        assert self.reduction is not None
        return self._predict_all(sets, self.reduction.workload)

    def _predict_all(self, sets: Sequence[Fixes], reduced: Callable[[Workload], Workload]) -> Predictions:
        if self._predict is None:
            self._predict = self._predict_changed
            if autograd_runs_in_forks():
                opened = model_built_once(self._workload, self._card, self._limit, self._repeat_first_step)
                self._predict = self._trace.enter_context(opened)
        predicted = self._predict

        def predict_fixed(fixes: Fixes) -> Prediction:
            return predicted(lambda workload: apply(list(fixes), reduced(workload)))

        return run_forked([functools.partial(predict_fixed, fixes) for fixes in sets], jobs())

    def predict_sized(self, fixes: Fixes, name: str, value: int) -> Prediction:
        """With fixes, and another value of one of its sizes; "" for the rows of a batch without such."""
        if name:
            return self._predict_changed(lambda one: apply(list(fixes), one.with_sizes({name: value})))
        smaller = FixUse(SmallerBatch.name, {"value": value})
        return self._predict_changed(lambda one: apply([smaller, *fixes], one))

    def _predict_changed(self, change: Callable[[Workload], Workload]) -> Prediction:
        return predict(change(self._workload), gpu=self._card, max=self._limit, search=False)

    def proposals(self, prediction: Prediction) -> Proposals:
        context = FixContext(prediction, self._workload)
        found: list[Proposal] = []
        failed: list[FailedFixes] = []
        for fix in all_fixes():
            if fix.name != "fsdp2":  # needs more than one GPU
                proposals, refuted = checked_proposals(fix, context)
                found += proposals
                failed += refuted
        mine = self._workload.fixes
        found = [one for one in found if not any(conflict(one.use, use) for use in mine)]
        self.reduction = reduction(context.model)
        return Proposals(model_id(context.model), tuple(found), failed=tuple(failed))


class _StoppedProgram:
    """A program that trains a model of its own. It runs once, up to where it makes its optimizer, inside the
    optimizer's constructor, or to where its Trainer begins to train:

    1. The first process, a child of the one that called `fit`, calls `search` there. When the search ends,
       `finish` sends what it returns to the parent and ends the process: the program never continues in it.
    2. For each set of fixes, `search` forks. The fork leaves `search` by `ContinueInFork`, applies the fixes
       to the model, returns from the constructor, traces the rest of the program and sends a Prediction.
    3. `finish(None)`: the program cannot be forked here, since it has threads, made an optimizer or
       ran a backward pass beside a GPU before.
       The parent then runs the whole program for each set.
    """

    reduction: Reduction | None = None  # known after `proposals`
    _made: Any = None  # the Trainer's loop, the optimizer, or the first model that is trained without one

    def _stop(self, search: Callable[[Progress], Any], progress: Progress) -> Callable[[Any], None]:
        """To be called with each loop of a Trainer and each optimizer that the program makes."""
        changes: list[Callable[[Any], None]] = []  # in a fork, its own

        def stop(made: Any) -> None:
            if not changes and (self._made is not None or _has_threads() or not autograd_runs_in_forks()):
                finish(None)
            if not changes:
                self._made = made
                try:
                    finish(search(progress))
                except ContinueInFork as fork:
                    changes.append(fork.change)
                except ForkWaits:
                    finish(None)
                except OomphError as error:
                    finish(error)
            try:
                changes[0](made)
            except OomphError as error:
                finish(error)

        return stop

    def predict_reduced(self, sets: Sequence[Fixes]) -> Predictions:
        assert self.reduction is not None
        return self._continue_with(sets, self.reduction)

    def _continue_with(self, sets: Sequence[Fixes], reduction: Reduction | None = None) -> Predictions:
        def change(fixes: Fixes) -> Callable[..., Any]:
            apply_to, whole = ModelChange(fixes), [reduction]

            def changed(made: Any) -> None:
                if whole and not isinstance(made, TrainingLoop) and (reduced := whole.pop()) is not None:
                    reduced.reduce_trained(model_of(made), made)
                apply_to(made)

            return changed

        return run_forked([change(fixes) for fixes in sets], jobs(), continues=True)

    def _proposals_here(self, prediction: Prediction) -> Proposals:
        """In a fork, which continues to the optimizer."""
        is_script, loops = isinstance(self, ScriptProgram), list[TrainingLoop]()

        def propose(made: Any) -> None:
            if isinstance(made, TrainingLoop):
                loops.append(made)
            else:
                finish(_proposals_for(prediction, is_script, made, *loops))

        ((_, found),) = run_forked([propose], 1, continues=True)
        if isinstance(found, UserError):  # nothing can be applied
            return Proposals(reason=str(found))
        if isinstance(found, Exception):
            raise found
        if not isinstance(found, Proposals):
            return Proposals(reason="the program makes no optimizer once its Trainer trains")
        self.reduction = reduction(model_of(self._made))
        return found


class FunctionProgram(_StoppedProgram):
    """Predicts a function that sets up and returns the step, with fixes of its model. Isolated, too."""

    def __init__(
        self,
        function: Callable[[], Any],
        card: GPU | None,
        limit: str | int | None,
        sizes: Sizes | None = None,
    ) -> None:
        self._function, self._sizes = function, sizes
        self._predict = functools.partial(predict, gpu=card, max=limit, sizes=sizes, search=False)

    def predict(self) -> Prediction:
        return _predict_before_forks(lambda: self._predict(self._function))

    def search(self, search: Callable[[Progress], Found], progress: Progress) -> Found:
        if autograd_runs_in_forks():
            stopped = self._calling(self._stop(search, progress))
            found: Any = in_fork(functools.partial(self._predict, stopped))
            if found is not None and not isinstance(found, Prediction):
                return found
        return search(progress)  # it was not stopped, or cannot be continued in forks

    def predict_with(self, sets: Sequence[Fixes]) -> Predictions:
        if self._made is not None:
            return self._continue_with(sets)
        changes = [self._calling(ModelChange(fixes)) for fixes in sets]
        return run_forked([functools.partial(self._predict, change) for change in changes], jobs())

    def predict_sized(self, fixes: Fixes, name: str, value: int) -> Prediction:
        """With fixes, and another size of its batches."""
        function = self._calling(ModelChange(fixes)) if fixes else self._function
        sizes = with_size(self._sizes, name, value)
        return in_fork(functools.partial(self._predict, function, sizes=sizes))

    def proposals(self, prediction: Prediction) -> Proposals:
        if self._made is not None:
            return self._proposals_here(prediction)

        def propose(optimizer: Any) -> None:
            raise _Proposals(_proposals_for(prediction, False, optimizer))

        try:
            in_fork(functools.partial(self._predict, self._calling(propose)))
        except _Proposals as answer:
            return answer.found
        except UserError as error:  # nothing can be applied
            return Proposals(reason=str(error))
        return Proposals(
            reason="the function made no optimizer of torch.optim, by which its model is found; make one in "
            "it, or describe the step as an oomph.Workload"
        )

    def _calling(self, call: Callable[[Any], None]) -> Callable[[], Any]:
        """The function, with a call for each optimizer that it makes."""

        def function() -> Any:
            with on_each_optimizer(call):
                return self._function()

        return function


class ScriptProgram(_StoppedProgram):
    """Predicts a script with fixes of its model."""

    _nothing_found = ""  # why, if `search` found no model

    def __init__(
        self, script: Script, card: GPU | None, limit: str | int | None, sizes: Sizes | None = None
    ) -> None:
        self._script, self._sizes = script, sizes
        self._predict = functools.partial(predict, gpu=card, max=limit, sizes=sizes, search=False)

    def predict(self) -> Prediction:
        found = self._predict(self._script)
        self._is_compiled = found.compile_seconds > 0
        last = self._script.steps
        if _requests(found, last - 1, with_update=True) == _requests(found, last, with_update=True):
            self._script = replace(self._script, repeat_last_step=True)
        return found

    def search(self, search: Callable[[Progress], Found], progress: Progress) -> Found:
        def run(progress: Progress) -> Any:
            if self._is_compiled:  # loaded once, not in each fork
                import oomph.prediction.tracer.compiled  # noqa: F401
            stopped = replace(self._script, on_optimizer=self._stop(search, progress))
            return run_silently(lambda _: self._predict(stopped), progress)

        try:
            found = _in_child(run, progress)
        except UserError as error:  # no model was found
            found, self._nothing_found = None, str(error).removeprefix("no fix was applied: ")
        # Else it was not stopped, or cannot be continued in forks.
        return search(progress) if found is None or isinstance(found, Prediction) else found

    def predict_with(self, sets: Sequence[Fixes]) -> Predictions:
        if self._made is not None:
            yield from self._continue_with(sets)
            return
        for number, fixes in enumerate(sets):
            fixed = replace(self._script, on_optimizer=ModelChange(fixes))
            try:
                yield number, self._run_silently(fixed)
            except OomphError as error:
                yield number, error

    def predict_sized(self, fixes: Fixes, name: str, value: int) -> Prediction:
        """With fixes, and another size of its batches."""
        fixed = replace(self._script, on_optimizer=ModelChange(fixes)) if fixes else self._script
        sizes = with_size(self._sizes, name, value)
        found: Prediction = self._run_silently(fixed, sizes=sizes)
        return found

    def proposals(self, prediction: Prediction) -> Proposals:
        """The script runs until it makes its optimizer."""
        if self._made is not None:
            return self._proposals_here(prediction)
        if self._nothing_found:
            return Proposals(reason=self._nothing_found)
        asked = replace(
            self._script, on_optimizer=lambda optimizer: finish(_proposals_for(prediction, True, optimizer))
        )
        try:
            found: Proposals = self._run_silently(asked)
        except UserError as error:
            return Proposals(reason=str(error).removeprefix("no fix was applied: "))
        return found

    def _run_silently(self, script: Script, **options: Any) -> Any:
        """Without the script's output, which the first prediction has shown."""
        run = functools.partial(run_silently, lambda progress: self._predict(script, **options))
        return _in_child(run, lambda text, fraction: None)


class ModelProgram(ScriptProgram):
    """Predicts a model that is given by its name, of which other sizes are other arguments."""

    def __init__(self, asked: FineTuning, card: GPU, limit: int, found: Prediction | None = None) -> None:
        """`found`: its prediction, if it was made before."""
        super().__init__(asked.script(), card, limit)
        self._asked, self._found = asked, found

    def predict(self) -> Prediction:
        found = self._found = self._found or self._run_silently(self._script)
        self._is_compiled = found.compile_seconds > 0
        return found

    def predict_sized(self, fixes: Fixes, name: str, value: int) -> Prediction:
        asked = replace(self._asked, **{name: value})  # type: ignore[arg-type]
        fixed = replace(asked.script(), on_optimizer=ModelChange(fixes) if fixes else None)
        found: Prediction = self._run_silently(fixed)
        return found

    def predict_on(self, ranks: int) -> Prediction:
        """The first of so many ranks."""
        found: Prediction = self._run_silently(replace(self._script, torchrun=True, ranks=ranks))
        return found


def _in_child(function: Callable[[Progress], Found], progress: Progress) -> Found:
    """A script ends the process in which it is predicted; in an isolated one, a fork of it."""
    if is_isolated():
        return in_fork(lambda: function(progress))
    return run_isolated(function, progress)


def with_size(sizes: Sizes | None, name: str, value: int) -> Sizes:
    if sizes == "longest":
        raise UserError(
            "another size and --sizes longest cannot be combined; give the length, as --sizes T=4096"
        )
    return {**(sizes or {}), name: value}


def _requests(prediction: Prediction, step: int, with_update: bool = False) -> list[tuple[int, str]]:
    """Bytes and op of what the passes of a step allocate, and its update. Workspaces stay."""
    return [
        (made.bytes, made.op)
        for made in prediction.allocations
        if made.step == step and made.kind != "workspace" and (with_update or made.during != "optimizer step")
    ]


def _predict_before_forks(run: Callable[[], Prediction]) -> Prediction:
    """In this process, so that its forks have torch's caches filled. Beside a GPU in a fork: torch runs no
    backward pass in forks of a process after its own."""
    return in_fork(run) if cuda_sees_gpu() else run()


def _has_threads() -> bool:
    """Of its own: forks would wait for them. tqdm's redraws bars; ours ends programs that train nothing."""
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    return any(type(each).__name__ != "TMonitor" and each.name != WATCH_THREAD for each in others)


def jobs() -> int:
    """Predictions at a time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Proposals(OomphError):
    """Ends a function that was called for its proposals alone."""

    @property
    def found(self) -> Proposals:
        return self.args[0]


def _proposals_for(
    prediction: Prediction, is_script: bool, made: Any, loop: TrainingLoop | None = None
) -> Proposals:
    model, found = propose_for(made, prediction, is_script, loop)
    return Proposals(model_id(model), tuple(found))


def with_applicable_fixes(made: Any, prediction: Prediction) -> Prediction:
    """For `Script.on_end`: the prediction with the names of the fixes that apply to the script's model."""
    if made is None:
        return prediction
    try:
        found = _proposals_for(prediction, True, made).found
    except UserError:  # nothing can be applied
        found = ()
    except Exception:  # not an error of the script, inside of which this runs; it runs again
        return prediction
    return replace(prediction, fixes=tuple(one.fix for one in found))


Program = WorkloadProgram | FunctionProgram | ScriptProgram


def propose_for_program(
    target: Script | Callable[[], Any],
    card: GPU | None,
    limit: str | int | None,
    kinds: Collection[FixKind],
    only: Collection[str],
    progress: Progress,
) -> tuple[Prediction, list[Proposal]]:
    """A script, or a function that returns no Workload, as it is; and the fixes that lower its peak, each
    predicted by itself, the largest saving first."""
    check_for_scripts([FixUse(name) for name in only], is_function=not isinstance(target, Script))
    if isinstance(target, Script) and cuda_has_started():
        return run_in_new_interpreter(propose_for_program, progress, target, card, limit, kinds, only)
    made = ScriptProgram if isinstance(target, Script) else FunctionProgram
    program = made(target, card, limit)  # type: ignore[arg-type]
    progress("predicting the step without fixes", None)
    prediction = program.predict()

    def search(progress: Progress) -> list[Proposal]:
        proposals = program.proposals(prediction)
        if proposals.reason:
            raise UserError(f"no fix can be applied: {proposals.reason}")
        found = [one for one in proposals.found if (one.fix in only if only else one.kind in kinds)]
        tried: list[Proposal | None] = []
        began = time.perf_counter()

        def report() -> None:
            each = (time.perf_counter() - began) / max(1, len(tried))
            left = f", about {max(1.0, each * (len(found) - len(tried))):.0f} s left" if tried else ""
            progress(f"predicting each fix by itself{left}", len(tried) / len(found))

        if found:
            report()
        for number, after in program.predict_with([(one.use,) for one in found]):
            tried.append(with_prediction(found[number], prediction, after))
            report()
        lower = [one for one in tried if one is not None and (one.saving is None or one.saving > 0)]
        return sorted(lower, key=lambda one: -(one.saving or 0))

    return prediction, program.search(search, progress)
