"""Steps of many accumulated batches, told from steps of two and of three.

From the second batch on a step allocates nothing new, so that two have the peak of all; and from there on
every batch takes as long as the one before it.
"""

from __future__ import annotations

from dataclasses import replace

from oomph.prediction.predict import predict
from oomph.records import Prediction
from oomph.workload import Workload

_FEW = 5  # two and three: no more work than that


def can_be_told(workload: Workload, whole: Prediction) -> bool:
    """Whether there is work to be saved, and two batches have the Workload's own peak."""
    if workload.accumulate <= _FEW:
        return False
    peak = predict(replace(workload, accumulate=2), gpu=whole.gpu).peak
    return (peak.allocated, peak.reserved) == (whole.peak.allocated, whole.peak.reserved)


def told(workload: Workload, gpu: str | None, limit: int | None) -> Prediction:
    """The Workload's prediction, with the peak of two batches and the time of all of them."""
    two, three = (predict(replace(workload, accumulate=n), gpu=gpu, max=limit) for n in (2, 3))
    if two.step_seconds is None or three.step_seconds is None:
        return two
    each = three.step_seconds - two.step_seconds
    return replace(two, step_seconds=two.step_seconds + (workload.accumulate - 2) * each)
