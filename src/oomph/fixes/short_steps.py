"""Steps of many accumulated batches, told from steps of two.

From the second batch on a step allocates nothing new, so that two have the peak of all; what a step takes
grows by the same with each batch. A fix that changes the batches' time alone, or the optimizer's alone, is
priced from two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from oomph.prediction.predict import predict
from oomph.records import Prediction
from oomph.workload import Workload

Part = Literal["batches", "optimizer", "both"]  # of a step: what takes another time with a fix
_BATCHES = 2


@dataclass(frozen=True)
class ShortStep:
    """A Workload with fewer batches a step, its prediction, and that of the whole one."""

    workload: Workload
    prediction: Prediction
    whole: Prediction
    batches: int  # of the whole

    def whole_seconds(self, after: float, part: Part) -> float | None:
        """What the whole step takes with a fix with which the short one takes `after`."""
        before, whole = self.prediction.step_seconds, self.whole.step_seconds
        if not before or not whole:
            return None
        left_out = self.batches - _BATCHES
        batch = (whole - before) / left_out
        if part == "batches":
            batch = (after - (before - _BATCHES * batch)) / _BATCHES
        return after + left_out * batch


def short_step(workload: Workload, whole: Prediction) -> ShortStep | None:
    """None where there is nothing to leave out, or where that would give another peak."""
    if workload.accumulate <= _BATCHES:
        return None
    short = replace(workload, accumulate=_BATCHES)
    prediction = predict(short, gpu=whole.gpu)
    if (prediction.peak.allocated, prediction.peak.reserved) != (whole.peak.allocated, whole.peak.reserved):
        return None
    return ShortStep(short, prediction, whole, workload.accumulate)
