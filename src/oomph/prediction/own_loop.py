"""A function that trains by itself rather than returning its step: its steps are those of its optimizer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from oomph.prediction.replay import Replay
from oomph.prediction.trace.optimizer_steps import TracedEnough
from oomph.prediction.trace.tracer import Tracer
from oomph.records import Moment, StepPeak


def call(function: Callable[[], Any], tracer: Tracer) -> Any:
    """What the function returns; None if it was ended after the first steps of its own loop."""
    tracer.optimizer_steps.watching = True
    try:
        with tracer.doing("forward"):
            return function()
    except TracedEnough:
        tracer.label_parameters()
        tracer.ledger.close()  # before the program's own objects go: what is left now is left after a step
        return None
    finally:
        tracer.optimizer_steps.watching = False


def conclude(tracer: Tracer, name: str) -> None:
    """The function was all there is: cut the trace where it was ended, and divide it into steps."""
    steps, ledger = tracer.optimizer_steps, tracer.ledger
    ends = steps.ends()
    if steps.stopped_at is not None:
        ledger.close()
        del ledger.events[steps.stopped_at :]
        ledger.note(
            f"traced the first {len(ends)} optimizer steps of {name}; what comes after them was not traced. "
            "A function that returns its step predicts the same faster"
        )
    elif len(ends) == 1:
        ledger.note(
            f"only one optimizer step of {name} was traced: the optimizer's state, made in it, may raise the "
            "peak of the second; a function that returns its step is traced for three"
        )
    if not any(event.label == "backward" for event in ledger.events):
        ledger.note(
            f"{name} ran no backward pass: this is the memory of what it did, not of a training step; "
            "for that, return the step"
        )
    if len(ends) > 1:
        tracer.work.kernels[:] = tracer.work.kernels[ends[-2].kernel : ends[-1].kernel]
    tracer.own_steps = tuple(end.event for end in ends)
    for index, event in enumerate(ledger.events):
        if event.action == "alloc" and ends:
            ledger.drafts[event.id].step = _step_at(index, tracer.own_steps)


def divided(run: Replay, ends: tuple[int, ...]) -> Replay:
    """The run with the peaks of its steps. What comes before the first belongs to it, as there is no telling
    where it began; what comes after the last belongs to the last."""
    if not ends:
        return run
    peaks: list[StepPeak] = []
    before = Moment(-1, 0, 0)
    for step, end in enumerate(ends, start=1):
        after = [moment for moment in run.timeline if moment.event > before.event]
        own = [before, *(moment for moment in after if moment.event < end)]
        counted = own if step < len(ends) else [before, *after]
        allocated = max(moment.allocated for moment in counted)
        peaks.append(StepPeak(step, allocated, max(moment.reserved for moment in counted), own[-1].allocated))
        before = own[-1]
    return replace(run, steps=tuple(peaks), peak_step=_step_at(run.peak_event, ends))


def _step_at(event: int, ends: tuple[int, ...]) -> int:
    """`ends`: for every step, the index of the first event after it."""
    return min(bisect_left(ends, event + 1), len(ends) - 1) + 1
