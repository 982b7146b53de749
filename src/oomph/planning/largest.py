"""The largest batch or the longest sequence with which a step fits; and how many cards it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from oomph import gpus
from oomph.errors import ProgramError, UserError
from oomph.fixes.application import apply
from oomph.fixes.training_changes import ShorterSequence, SmallerBatch
from oomph.gpus import GPU
from oomph.parallel import Parallel
from oomph.prediction import predict
from oomph.records import Peak, Plan, Progress
from oomph.workload import Workload

_NAMES = {"batch": SmallerBatch.size_names, "sequence": ShorterSequence.size_names}
_MOST_PREDICTIONS = 16


class Largest(NamedTuple):
    size: int
    exact: bool  # False: more may fit; the search was ended


def largest_size(workload: Workload, plan: Plan, what: str, progress: Progress) -> tuple[Largest, Largest]:
    """The largest `what` ("batch" or "sequence") that fits the plan's card, without its fixes and with."""
    name = size_name(workload, what)

    def report(text: str) -> None:
        progress(text, None)

    without = _largest(workload, name, plan, report)
    return without, _largest(apply(plan, workload), name, plan, report) if plan.fixes else without


def size_name(workload: Workload, what: str) -> str:
    for name in workload.sizes or {}:
        if name.lower() in _NAMES[what]:
            return name
    has = ", ".join(workload.sizes or {}) or "none"
    raise UserError(
        f"the Workload names no size of its {what}; its sizes are {has}. Name them, as "
        'Workload(batch=lambda device, B, T: ..., sizes={"B": 8, "T": 1024})'
    )


def _largest(workload: Workload, name: str, plan: Plan, progress: Callable[[str], None]) -> Largest:
    """By lines through the sizes tried before, and by halves."""
    reserved: dict[int, int] = {}
    low, high = 0, 0  # fits; does not
    size = (workload.sizes or {})[name]
    while len(reserved) < _MOST_PREDICTIONS and (not high or high - low > 1):
        progress(f"predicting {name}={size:,}")
        sizes = {**(workload.sizes or {}), name: size}
        try:
            found = predict(
                replace(workload, sizes=sizes), gpu=gpus.find(plan.gpu), max=plan.limit, search=False
            )
        except ProgramError:  # it cannot run at this size
            if not low:
                raise
            return Largest(low, exact=False)
        reserved[size] = found.peak.reserved
        if found.fits:
            low = max(low, size)
        else:
            high = min(high or size, size)
        size = _next_size(reserved, low, high, plan.limit)
        if size == 0:
            break
    return Largest(low, exact=high - low == 1 or low == 0)


def _next_size(reserved: dict[int, int], low: int, high: int, limit: int) -> int:
    if not low:
        return high // 2
    if high and len(reserved) % 2:  # reserved memory grows in steps, which lines miss
        return (low + high) // 2
    others = [size for size in reserved if size != low]
    other = high or max(others, default=0)
    if not other:
        return 2 * low
    slope = (reserved[other] - reserved[low]) / (other - low)
    size = low + int((limit - reserved[low]) / slope) if slope > 0 else 16 * low
    return min(max(low + 1, size), high - 1 if high else 16 * low)


# How many cards -----------------------------------------------------------------------------------------

_MOST_RANKS = 1024
_NO_LESS = 0.99  # x the peak of half as many ranks: more of them change nothing


class RankTrial(NamedTuple):
    """One rank of so many. The batch is that of one rank."""

    ranks: int
    peak: Peak
    fits: bool
    sent: int  # bytes to other ranks in a step
    step_seconds: float | None


def ranks_needed(
    workload: Workload, gpu: str | GPU, max: str | int | None, progress: Progress
) -> list[RankTrial]:
    """The step as one of 1, 2, 4, ... ranks of FSDP2. The last one fits, unless no number of them is enough.

    From some number on, what is left are activations and the gathered blocks, which FSDP2 does not divide.
    """
    if workload.parallel is not None:
        raise UserError("the step is already spread over ranks; give the step of one process")
    tried: list[RankTrial] = []
    ranks = 1
    while ranks <= _MOST_RANKS:
        progress(f"predicting one of {ranks} ranks", None)
        spread = workload if ranks == 1 else replace(workload, parallel=Parallel(ranks))
        found = predict(spread, gpu=gpu, max=max, search=False)
        fits = found.fits is True
        tried.append(RankTrial(ranks, found.peak, fits, found.work.sent, found.step_seconds))
        settled = len(tried) > 2 and found.peak.device >= _NO_LESS * tried[-2].peak.device
        if fits or settled:
            break
        ranks *= 2
    return tried
