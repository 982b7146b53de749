"""Predictions in isolated processes, and in fresh ones again where the outcome depends on a guess."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Literal, TypeVar

import torch

from oomph.errors import OomphError, ProgramError
from oomph.prediction.child import check_torch
from oomph.prediction.intervals import calibrated, enclosing
from oomph.prediction.isolation import TookTooLong, again, discard_output, is_isolated, run_isolated
from oomph.prediction.result import verdicts_at
from oomph.prediction.tracer.values import Assumptions, Condition, assuming
from oomph.records import SIZES_DEPEND_ON_VALUES, Interval, Note, Prediction, Progress, Site
from oomph.torch_internals import current_dispatch_modes

# All runs with other sizes together: twice as long as the first run, within these.
_LEAST_SECONDS_MORE, _MOST_SECONDS_MORE = 60.0, 180.0
T = TypeVar("T")
_MOST_CONDITIONS = 8  # that get the other answer because the program fails after them


def predict_isolated(
    function: Callable[[Progress], Prediction],
    progress: Progress,
    allow: Collection[str] = (),
) -> Prediction:
    """`function` predicts in a child process; in fresh ones again where the outcome depends on a guess.

    If the program fails after conditions on unknown values, they get the other answer, one after the other.
    If it gives what a mask selects a shape for another number of elements, the mask selects that number.
    If sizes depend on values, the interval is found with the most and with the fewest elements, where that
    does not take long.
    """
    if is_isolated():
        return function(progress)
    # Where GPUs are visible, the first question starts CUDA; the child hides them before it asks.
    has_gpu = torch.cuda.device_count() > 0 or torch.accelerator.is_available()
    if not has_gpu and not current_dispatch_modes():
        check_torch()  # once here, and not in every child; forks can run backward passes after it
    began = time.perf_counter()
    prediction, assumed, took = _that_does_not_fail(function, progress, allow)
    if prediction.interval is not None and prediction.interval.reason == SIZES_DEPEND_ON_VALUES:
        prediction = _with_interval(prediction, function, progress, allow, assumed, took)
        prediction = replace(prediction, seconds=time.perf_counter() - began)
    return prediction


def _that_does_not_fail(
    function: Callable[[Progress], Prediction], progress: Progress, allow: Collection[str]
) -> tuple[Prediction, Assumptions, float]:
    """The prediction, the assumptions under which the program does not fail, and the seconds of that run."""
    assumed = Assumptions()
    failed: dict[Condition, OomphError] = {}
    as_guessed: OomphError | None = None  # before masks selected what the failure states
    shown = progress
    while True:
        started = time.monotonic()
        try:
            with assuming(assumed):
                prediction = run_isolated(function, shown, allow)
            break
        except OomphError as error:
            if isinstance(error, ProgramError) and error.share and len(assumed.shares) < _MOST_CONDITIONS:
                file, line, share = error.share
                if (file, line) not in assumed.shares:
                    as_guessed = as_guessed or error
                    shown = again(progress, "with a mask that selects another share")
                    assumed = replace(assumed, shares={**assumed.shares, (file, line): share})
                    continue
            first = as_guessed or next(iter(failed.values()), error)
            last = error.last_condition if isinstance(error, ProgramError) else None
            if last is None or last[:3] in {each[:3] for each in failed} or len(failed) == _MOST_CONDITIONS:
                if first is error:
                    raise
                raise first from None
            failed[last] = error
            shown = again(progress, "with the other answer to a condition")
            assumed = replace(assumed, failed=frozenset(failed))
    notes = []
    for (file, line, *_), failure in failed.items():
        text = str(failure).split("\n")[0]
        text = f"a condition on values has the answer with which the program does not fail ({text})"
        notes.append(Note(text, Site(file, line, "")))
    prediction = replace(prediction, assumptions=(*notes, *prediction.assumptions))
    return prediction, assumed, time.monotonic() - started


def _with_interval(
    prediction: Prediction,
    function: Callable[[Progress], Prediction],
    progress: Progress,
    allow: Collection[str],
    assumed: Assumptions,
    took: float,
) -> Prediction:
    """With the peaks of runs with the most and the fewest elements. `took`: seconds of one run."""
    until = time.monotonic() + min(max(2 * took, _LEAST_SECONDS_MORE), _MOST_SECONDS_MORE)
    left_out: list[str] = []

    def other(sizes: Literal["fewest", "most"]) -> Prediction:
        name = "largest" if sizes == "most" else "smallest"
        shown = again(progress, f"with the {name} sizes")
        try:
            if until - time.monotonic() < took / 2:
                raise TookTooLong
            with assuming(replace(assumed, sizes=sizes)):
                return run_isolated(functools.partial(run_silently, function), shown, allow, until)
        except TookTooLong:
            left_out.append(name)
        except OomphError:  # the program cannot run with such sizes
            pass
        return prediction

    high, low = other("most"), other("fewest")
    if left_out:
        names = " and ".join(dict.fromkeys(left_out))
        text = f"sizes depend on values; the {names} were not traced, because one run takes {took:.0f} s"
        prediction = replace(prediction, assumptions=(*prediction.assumptions, Note(text)))
    interval = calibrated(prediction.needed, [low.needed, high.needed], SIZES_DEPEND_ON_VALUES)
    known = prediction.interval or interval  # of what else is not known
    least, most = enclosing(interval.low, interval.high, known.low, known.high)
    interval = Interval(least, most)
    prediction = replace(prediction, interval=interval)
    if prediction.limit is not None:
        prediction = replace(prediction, verdict=verdicts_at(prediction, [prediction.limit])[0])
    return prediction


def run_silently(function: Callable[[Progress], T], progress: Progress) -> T:
    """The program has printed all that it prints before."""
    if is_isolated():
        discard_output()
    return function(progress)
