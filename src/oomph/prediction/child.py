"""What executes in the isolated process: `run(request)`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import torch

from oomph import gpus
from oomph.errors import ArgumentError, OomphError, ProgramError, UserError, place
from oomph.gpus import GPU
from oomph.prediction import program
from oomph.prediction.allocator import replay
from oomph.prediction.isolation import (
    autograd_runs,
    can_restart,
    cuda_sees_gpu,
    finish,
    in_fork,
    is_isolated,
    restart,
    trace_lock,
)
from oomph.prediction.program import Script, run_script
from oomph.prediction.result import card_of, nccl_buffers, prediction_of, settings_of
from oomph.prediction.tracer.batch_sizes import BatchSizes, Sizes
from oomph.prediction.tracer.dispatch import WrongDevice
from oomph.prediction.tracer.gradient_reuse import count_uses_of_gradient, remember_uses_of_gradient
from oomph.prediction.tracer.session import tracing
from oomph.prediction.tracer.tracer import OpLog, Tracer
from oomph.records import OpRow, Prediction, Progress
from oomph.torch_internals import keystr, self_test, storage_id, tree_flatten_with_path
from oomph.workload import Workload

_CONDITIONS_SHOWN = 5
_depth = 0
_tracer_with_model: Tracer | None = None  # while `model_built_once` keeps its trace open
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """What is predicted: a target, resolved, on a card."""

    target: Workload | Script | Callable[[], Any]
    card: GPU
    named: bool  # the card was asked for
    limit: int | None  # bytes that the allocator may reserve
    sizes: Sizes | None = None  # of the batches of a script or function
    search: bool = True  # with the memory that torch.backends.cudnn.benchmark takes for a moment
    began: float = field(default_factory=time.perf_counter)


def run(request: Request, progress: Progress) -> Prediction:
    """Trace the program, and make the prediction of the trace.

    A script whose steps repeat, and a function that trains without end, end here and do not return: an
    exception through their frames would run their handlers, which save checkpoints, and free what they hold.
    """

    def result(tracer: Tracer) -> Prediction:
        if tracer.batch_sizes is not None:
            tracer.batch_sizes.check_applied(tracer.batches.tensors())
        target = request.target
        found = prediction_of(tracer, target, request.card, request.named, request.limit)
        found = replace(found, seconds=time.perf_counter() - request.began)
        if isinstance(target, Script) and target.on_end is not None:
            found = target.on_end(tracer.training.trained and tracer.training.trained(), found)
        return found

    most = request.limit or request.card.limit()
    return result(
        trace(
            request.target,
            request.card,
            progress,
            sizes=request.sizes,
            finish=lambda tracer: finish(result(tracer)),
            search_limit=most if request.search else 0,
            limit=request.limit,
        )
    )


def trace(
    target: Workload | Script | Callable[[], Any],
    card: GPU,
    progress: Progress,
    log: OpLog | None = None,
    finish: Callable[[Tracer], NoReturn] | None = None,
    sizes: Sizes | None = None,
    search_limit: int = 0,
    limit: int | None = None,
) -> Tracer:
    """Run the target on the fake GPU; its own failures come out as ProgramError.

    `finish` ends the process of a Script whose steps repeat, or of a function that trains without end.
    `search_limit`: bytes that torch.backends.cudnn.benchmark may fill. `limit`: those that the allocator may
    reserve; None: as much as the largest card has.
    """

    def run(tracer: Tracer) -> Tracer:
        tracer.progress, tracer.search_limit = progress, search_limit
        tracer.growth.limit = limit or max(each.memory for each in gpus.catalogue())
        if sizes is not None:
            tracer.batch_sizes = BatchSizes(sizes, tracer.recorder.note)
        if isinstance(target, Workload):
            program.run_workload(target, tracer, progress)
        elif isinstance(target, Script):
            if finish is None or not is_isolated():
                raise UserError("a script is predicted in a child process, which is not possible here")
            run_script(target, tracer, progress, finish)
        elif callable(target) and not isinstance(target, torch.nn.Module):
            program.run_function(target, tracer, progress, finish if is_isolated() else None)
        else:
            raise UserError(
                f"predict takes a Workload, a function of no arguments or oomph.Script(path); "
                f"{type(target).__name__} was given"
            )
        tracer.label_parameters()
        return tracer

    return _traced(run, card, log)


@contextlib.contextmanager
def model_built_once(
    workload: Workload, card: GPU, max: int, repeat_first_step: bool
) -> Iterator[Callable[[Callable[[Workload], Workload]], Prediction]]:
    """The workload's model is built, and the trace stays open: a fork of this process predicts the workload
    as a function changes it. Building takes as long as a step of some models. `repeat_first_step`: the
    forward and backward passes of the second step are known to be those of the first, and are not traced
    again."""
    global _tracer_with_model
    limit = card.limit(max, nccl=nccl_buffers(workload))
    with _open_trace(card) as tracer:
        tracer.repeat_first_step = repeat_first_step
        model = _run_traced(lambda tracer: program.build_model(workload, tracer), tracer)
        with_model = replace(workload, model=lambda: model)

        def predicted(change: Callable[[Workload], Workload]) -> Prediction:
            changed = change(with_model)

            def run(tracer: Tracer) -> Prediction:
                program.run_workload(changed, tracer, lambda text, fraction: None)
                tracer.label_parameters()
                return prediction_of(tracer, changed, card, True, limit)

            return _run_traced(run, tracer)

        _tracer_with_model = tracer
        try:
            yield predicted
        finally:
            _tracer_with_model = None


def fake_model(workload: Workload) -> torch.nn.Module:
    """The workload's model on tensors without data, as it is before it is moved to the GPU."""
    if _tracer_with_model is not None:
        return program.build_model(workload, _tracer_with_model)
    return _traced(lambda tracer: program.build_model(workload, tracer), card_of(None))


def call_on_fake_gpu(function: Callable[[], Any]) -> Any:
    """What the user's function returns, run on a fake GPU."""
    return _traced(lambda tracer: function(), card_of(None))


def _traced(run: Callable[[Tracer], T], card: GPU, log: OpLog | None = None) -> T:
    with _open_trace(card, log) as tracer:
        return _run_traced(run, tracer)


@contextlib.contextmanager
def _open_trace(card: GPU, log: OpLog | None = None) -> Iterator[Tracer]:
    global _depth
    check_torch()
    with trace_lock:
        if _depth:
            raise UserError("predict was called by a program that is itself being predicted; call it outside")
        _depth += 1
        try:
            with tracing(card, log) as tracer:
                yield tracer
        finally:
            _depth -= 1


@functools.cache
def check_torch() -> None:
    """Once per process, before the first trace."""

    def check() -> tuple[int, int]:
        self_test()
        return count_uses_of_gradient()

    # Autograd starts a thread for each device at the first backward pass, and torch runs none in a fork
    # after that. Within a FakeTensorMode, a machine without a GPU has one.
    if not cuda_sees_gpu():
        autograd_runs()
    elif is_isolated():
        remember_uses_of_gradient(in_fork(check))
        return
    with trace_lock:
        remember_uses_of_gradient(check())


def _run_traced(run: Callable[[Tracer], T], tracer: Tracer) -> T:
    tracer.boundary.outside |= {_run_traced.__code__, _restarting.__code__, run.__code__}
    try:
        return _restarting(run, tracer)
    except WrongDevice as error:
        _check_batch_device(error, tracer)
        raise _program_error(error, tracer) from error
    except ArgumentError as error:
        raise _program_error(error, tracer) from error  # the program's own call of an op, at its own line
    except (OomphError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise _program_error(error, tracer) from error


def _restarting(run: Callable[[Tracer], T], tracer: Tracer) -> T:
    """A failure after blocks were repeated may be ours: the program runs again, all of it traced."""
    try:
        return run(tracer)
    except Exception:
        if tracer.blocks_repeated and can_restart():
            restart()
        raise


def _program_error(error: BaseException, tracer: Tracer) -> ProgramError:
    """The program's own failure, with the guesses that it branched on before."""
    found, estimates = ProgramError.of(error), tracer.estimates
    if tracer.batch_sizes is not None and tracer.batch_sizes.resized:
        found.args = (tracer.batch_sizes.explain_failure(found.args[0]),)
    found.last_condition = estimates.last_condition
    found.share = estimates.share_stated(error)
    found.assumed = tuple(
        f"{place(site.file, site.line)}: a condition on values is taken as {taken}"
        for site, taken in list(estimates.conditions.items())[-_CONDITIONS_SHOWN:]
    )
    return found


def _check_batch_device(error: WrongDevice, tracer: Tracer) -> None:
    """If the stray tensor is the batch's own, the mistake is in the Workload's batch function."""
    stray = storage_id(error.tensor.untyped_storage())  # a view of it counts as itself
    for path, value in tree_flatten_with_path(tracer.batch)[0]:
        if isinstance(value, torch.Tensor) and storage_id(value.untyped_storage()) == stray:
            name = f"batch{keystr(path)}" if path else "a tensor"
            raise UserError(
                f"Workload batch(device) returned {name} on {error.tensor.device}; "
                "build every tensor on the device it is given: "
                "batch=lambda device: torch.randint(..., device=device)"
            ) from error


def predict_ops(
    target: Workload | Script | Callable[[], Any],
    card: GPU,
    measured: Collection[OpRow],
    describe: Callable[[Any], str],
    progress: Progress,
) -> list[OpRow]:
    """The ops of the steps that `measured` has, in the same format. `describe`: an op's result in words."""
    log = OpLog(describe)
    steps = {row.phase.split()[1] for row in measured if row.phase.startswith("step")}

    def rows(tracer: Tracer) -> list[OpRow]:
        return _rows_of(log, tracer, steps)

    return rows(trace(target, card, progress, log, lambda tracer: finish(rows(tracer))))


def _rows_of(log: OpLog, tracer: Tracer, steps: Collection[str]) -> list[OpRow]:
    events = tracer.recorder.events
    allocations = [pending.finish() for pending in tracer.recorder.allocations]
    settings, _ = settings_of(tracer)
    replayed = replay(events, allocations, settings=settings)
    allocated = {moment.event: moment.allocated for moment in replayed.timeline}
    after_event, level = [], 0
    for index in range(len(events)):
        level = allocated.get(index, level)
        after_event.append(level)
    rows = []
    for op, outputs, phase, first, last in log.rows:
        if phase != "setup" and phase.split()[1] not in steps:
            continue
        inside = after_event[first:last]
        before = after_event[first - 1] if first else 0
        sizes = [allocations[event.id].bytes for event in events[first:last] if event.action == "alloc"]
        rows.append(
            OpRow(
                op=op,
                outputs=outputs,
                before=before,
                after=inside[-1] if inside else before,
                high=max([before, *inside]),
                phase=phase,
                n_allocs=len(sizes),
                requested=sum(sizes),
            )
        )
    return rows
