"""oomph.predict: trace a step on fake tensors, replay its events through the simulated allocator."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from oomph import gpus
from oomph.errors import ArgumentError, OomphError, ProgramError, UserError
from oomph.gpus import GPU
from oomph.prediction import program
from oomph.prediction.allocator_settings import allocator_settings
from oomph.prediction.remarks import growth_of, remarks
from oomph.prediction.replay import Replay, replay
from oomph.prediction.roofline import step_work
from oomph.prediction.trace.dispatch import WrongDevice
from oomph.prediction.trace.oplog import OpLog
from oomph.prediction.trace.session import tracing
from oomph.prediction.trace.sites import is_internal
from oomph.prediction.trace.tracer import Tracer
from oomph.records import Allocation, Note, Peak, Prediction
from oomph.units import parse_bytes
from oomph.workload import Workload

DEFAULT_GPU = "h200"  # whose CUDA paths are assumed when no GPU is named: the one oomph is measured against
_running = threading.RLock()  # a trace changes torch for the whole process: one at a time
_depth = 0
T = TypeVar("T")


def predict(
    target: Workload | Callable[[], Any],
    *,
    gpu: str | GPU | None = None,
    max: str | int | None = None,
    progress: program.Progress | None = None,
) -> Prediction:
    """The memory of a training step on `gpu`, without one.

    `target` is a Workload, or a function of no arguments, which is called once; if it returns a Workload,
    that is predicted; if it returns a callable, that is the step and is called three times.
    `gpu` is a name of the catalogue or a size ("24GiB"); `max` limits the allocator further.
    `progress` is told what is going on: a text, and a fraction where one is known.
    """
    card = _card(gpu)
    limit = _limit(card if gpu is not None else None, max)
    began = time.perf_counter()
    tracer = trace(target, card, progress or (lambda text, fraction: None))
    ledger = tracer.ledger
    allocations = tuple(draft.finish() for draft in ledger.drafts)
    settings = allocator_settings(tracer.allocator)
    free_run = replay(ledger.events, allocations, settings=settings)
    refused = _refused(free_run, tracer, allocations, limit)
    step_seconds, work = step_work(tracer.work.kernels, card)
    growth = growth_of(free_run, ledger.events, allocations)
    return Prediction(
        gpu=card.name if gpu is not None else None,
        gpu_title=card.title,
        capacity=card.memory if gpu is not None else None,
        limit=limit,
        fits=None if limit is None else refused is None,
        refused=refused,
        peak=_peak(free_run, tracer, allocations, card),
        steps=tuple(replace(step, device=step.reserved + card.context) for step in free_run.steps),
        at_peak=free_run.at_peak,
        timeline=free_run.timeline,
        events=tuple(ledger.events),
        allocations=allocations,
        notes=(
            *_fixes_in(target),
            *ledger.notes,
            *remarks(card, gpu is not None, growth, allocations),
        ),
        seconds=time.perf_counter() - began,
        step_seconds=step_seconds,
        work=work,
        growth=growth,
    )


def _fixes_in(target: Workload | Callable[[], Any]) -> tuple[Note, ...]:
    names = ", ".join(use.fix for use in target.fixes) if isinstance(target, Workload) else ""
    return (Note(f"with the fixes {names}"),) if names else ()


def trace(
    target: Workload | Callable[[], Any], card: GPU, progress: program.Progress, log: OpLog | None = None
) -> Tracer:
    """Run the target on the pretend GPU; its own failures come out as ProgramError."""

    def run(tracer: Tracer) -> Tracer:
        if isinstance(target, Workload):
            program.run_workload(target, tracer, progress)
        elif callable(target) and not isinstance(target, torch.nn.Module):
            program.run_function(target, tracer, progress)
        else:
            raise UserError(
                f"predict takes a Workload or a function of no arguments; {type(target).__name__} was given"
            )
        tracer.label_parameters()
        return tracer

    return _traced(run, card, log)


def built(workload: Workload) -> torch.nn.Module:
    """The workload's model on tensors without data, as it is before it is moved to the GPU."""
    return _traced(lambda tracer: program.build_model(workload, tracer), _card(None))


def called(function: Callable[[], Any]) -> Any:
    """What the user's function returns, with a pretend GPU there if it asks for one."""
    return _traced(lambda tracer: function(), _card(None))


def _traced(run: Callable[[Tracer], T], card: GPU, log: OpLog | None = None) -> T:
    global _depth
    with _running:
        if _depth:
            raise UserError("predict was called by a program that is itself being predicted; call it outside")
        _depth += 1
        try:
            return _run_traced(run, card, log)
        finally:
            _depth -= 1


def _run_traced(run: Callable[[Tracer], T], card: GPU, log: OpLog | None) -> T:
    with tracing(card, log) as tracer:
        tracer.boundary.outside |= {_run_traced.__code__, run.__code__}
        try:
            return run(tracer)
        except ArgumentError as error:
            raise _program_error(error) from error  # the program's own call of an op, at its own line
        except OomphError:
            raise
        except WrongDevice as error:
            _blame_batch(error, tracer)
            raise _program_error(error) from error
        except Exception as error:
            raise _program_error(error) from error


def _limit(card: GPU | None, most: str | int | None) -> int | None:
    """What the allocator may reserve: the card less the CUDA context, or `max` if that is less."""
    limits = [card.memory - card.context] if card is not None else []
    limits += [parse_bytes(most)] if most is not None else []
    return min(limits, default=None)


def _card(gpu: str | GPU | None) -> GPU:
    return gpu if isinstance(gpu, GPU) else gpus.find(gpu if gpu is not None else DEFAULT_GPU)


def _refused(
    free_run: Replay, tracer: Tracer, allocations: tuple[Allocation, ...], limit: int | None
) -> Allocation | None:
    """The request that an allocator limited to the card could not serve, if there is one."""
    if limit is None or free_run.highest_reserved <= limit:
        return None
    settings = allocator_settings(tracer.allocator)
    refused = replay(tracer.ledger.events, allocations, limit, settings=settings).refused
    return None if refused is None else allocations[refused]


def _peak(run: Replay, tracer: Tracer, allocations: tuple[Allocation, ...], card: GPU) -> Peak:
    event = tracer.ledger.events[run.peak_event] if run.peak_event >= 0 else None
    last = allocations[event.id] if event is not None and event.action == "alloc" else None
    return Peak(
        allocated=run.peak_allocated,
        reserved=run.peak_reserved,
        device=run.peak_reserved + card.context,
        step=run.peak_step,
        stage=last.during if last else None,
        site=last.site if last else None,
    )


def _blame_batch(error: WrongDevice, tracer: Tracer) -> None:
    """If the stray tensor is the batch's own, the Workload's batch function is to blame, not the model."""
    stray = error.tensor.untyped_storage()._cdata  # a view of it counts as itself
    for path, value in tree_flatten_with_path(tracer.batch)[0]:
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == stray:
            name = f"batch{keystr(path)}" if path else "a tensor"
            raise UserError(
                f"Workload batch(device) returned {name} on {error.tensor.device}; "
                "build every tensor on the device it is given: "
                "batch=lambda device: torch.randint(..., device=device)"
            ) from error


def _program_error(error: Exception) -> ProgramError:
    """The program's own failure, with the innermost line that is the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_internal(frame.filename)]
    file, line = (own[-1].filename, own[-1].lineno) if own else (None, None)
    return ProgramError(f"{type(error).__name__}: {error}", file, line)
