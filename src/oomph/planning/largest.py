"""The largest batch or the longest sequence with which a step fits; and how many cards it needs."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from oomph.errors import ProgramError, UserError
from oomph.fixes.micro_batches import MicroBatching
from oomph.fixes.training_changes import ShorterSequence, SmallerBatch
from oomph.gpus import GPU
from oomph.parallel import Parallel
from oomph.planning.programs import Fixes, Program, WorkloadProgram
from oomph.prediction import predict
from oomph.records import (
    DimensionNames,
    Largest,
    Peak,
    Plan,
    PredictedFixes,
    Prediction,
    Progress,
    named_shapes,
)
from oomph.workload import Workload

LARGEST: Mapping[str, tuple[str, tuple[str, ...]]] = {  # the name for programs, and those of Workloads' sizes
    "batch": ("B", SmallerBatch.size_names),
    "sequence": ("T", ShorterSequence.size_names),
}
_MOST_PREDICTIONS = 16
_NARROW = 0.004  # x the size: the search ends when no more than this is open


class Size(NamedTuple):
    """A size of the step as it is given."""

    name: str
    value: int


def size_of(program: Program, prediction: Prediction, what: str) -> Size:
    """What `what`, "batch" or "sequence", is called, and its size now."""
    letter, names = LARGEST[what]
    if isinstance(program, WorkloadProgram):
        for name, value in prediction.sizes:
            if name.lower() in names:
                return Size(name, value)
        has = ", ".join(name for name, _ in prediction.sizes) or "none"
        raise UserError(
            f"the Workload names no size of its {what}; its sizes are {has}. Name them, as "
            'Workload(batch=lambda device, B, T: ..., sizes={"B": 8, "T": 1024})'
        )
    known = DimensionNames(guess=True)
    for one in prediction.batch:
        for name, value in zip(known.of(one.shape, one.dtype), one.shape, strict=True):
            if name == letter and len(one.shape) > 1:
                return Size(name, value)
    moved = ", ".join(named_shapes(prediction.batch)[:4])
    why = f"no {what} is known in what the program moves to the GPU ({moved})"
    if not moved:
        why = f"the program makes its batch on the GPU, where the {what} cannot be changed from outside"
    raise UserError(f"{why}; make it on the host, or describe the step as a Workload that names its sizes")


def with_largest(
    program: Program, prediction: Prediction, plan: Plan, held: int, what: str | None, progress: Progress
) -> Plan:
    """With the largest `what` that fits the plan's card, without its fixes and with; and, if it does not fit,
    with the largest part of the batch that would. `held`: bytes of parameters, gradients, optimizer state."""
    found: dict[str, Largest] = {}
    if what is not None:
        size = size_of(program, prediction, what)
        finder = _Finder(program, plan.limit, held, size, lambda low, high: range(low + 1, high or 16 * low))
        found["without"] = finder.find((), plan.before, progress)
        found["with"] = found["without"]
        if plan.fixes:
            found["with"] = finder.find(plan.fixes, plan.after, progress)
        plan = replace(plan, largest={what: found}, predictions=plan.predictions + finder.predictions)
    if plan.fits or plan.least:
        return plan
    try:
        size = _rows(program, prediction)
        parts = [value for value in range(1, size.value + 1) if size.value % value == 0]
        if what == "batch":
            fitting = max((value for value in parts if value <= found["with"].size), default=0)
            return replace(plan, rows=size.value, rows_that_fit=fitting)
        between = lambda low, high: [value for value in parts if low < value < high]  # noqa: E731
        finder = _Finder(program, plan.limit, held, size, between)
        fitting = finder.find(plan.fixes, plan.after, progress).size
    except (UserError, ProgramError) as error:
        return replace(plan, no_rows=str(error))
    predictions = plan.predictions + finder.predictions
    return replace(plan, rows=size.value, rows_that_fit=fitting, predictions=predictions)


def largest_of(
    program: Program,
    plan: Plan,
    held: int,
    size: Size,
    between: Callable[[int, int], Sequence[int]],
    progress: Progress,
) -> Largest:
    """The largest value of `size` that fits with the fixes of a plan, of those of `between` (_Finder)."""
    return _Finder(program, plan.limit, held, size, between).find(plan.fixes, plan.after, progress)


def _rows(program: Program, prediction: Prediction) -> Size:
    """Also of a Workload that names no sizes."""
    try:
        return size_of(program, prediction, "batch")
    except UserError:
        rows = Counter(one.shape[0] for one in prediction.batch if one.shape)
        if not isinstance(program, WorkloadProgram) or not rows:
            raise
        return Size("", rows.most_common(1)[0][0])


class _Finder:
    """Finds the largest size that fits, among those of `between`: larger than the first and smaller than the
    second number that it is given; the second is 0 where no size is known that does not fit."""

    def __init__(
        self,
        program: Program,
        limit: int,
        held: int,
        size: Size,
        between: Callable[[int, int], Sequence[int]],
    ) -> None:
        self._program, self._limit, self._held, self._size = program, limit, held, size
        self._between = between
        self.predictions = 0

    def find(self, fixes: Fixes, known: PredictedFixes, progress: Progress) -> Largest:
        """`known`: the step with these fixes, at its own size."""
        value = self._size.value
        of_rows = self._size.name.lower() in ("", *LARGEST["batch"][1])
        if not known.fits and of_rows:  # as few rows may not be cut into as many parts
            cut = [use for use in fixes if use.fix == MicroBatching.name]
            fixes = tuple(use for use in fixes if use not in cut)
            value //= math.prod(use.options.get("parts", 2) for use in cut)
        search = _Search(self._limit - known.margin, self._held, value, known)
        while left := self._between(search.low, search.high):
            is_narrow = 0 < search.high - search.low <= search.low * _NARROW
            if search.count == _MOST_PREDICTIONS or is_narrow:
                self.predictions += search.count
                return Largest(search.low, exact=False)
            size = search.next(left)
            progress(f"finding the largest {self._size.name or 'batch'} that fits: predicting {size:,}", None)
            try:
                search.add(size, self._program.predict_sized(fixes, self._size.name, size))
            except ProgramError:  # it cannot run at this size
                if not search.low:
                    raise
                search.add(size, None)
            if size == left[0] and not search.low:
                break
        self.predictions += search.count
        return Largest(search.low, exact=True, fails=search.fails)


class _Search:
    """Along lines through the sizes predicted before, and by halves: reserved memory grows in steps."""

    def __init__(self, limit: int, held: int, size: int, known: PredictedFixes) -> None:
        self.low, self.high = (size, 0) if known.fits else (0, size)  # fits; does not, 0: none is known
        self.count = 0
        self.fails = False  # at `high`
        self._limit = limit
        self._reserved, self._allocated = {0: held}, {0: held}
        self._remember(size, known.peak)
        self._by_line = False  # how the last size was chosen

    def add(self, size: int, found: Prediction | None) -> None:
        """`found`: None where the program fails."""
        self.count += 1
        if found is not None:
            self._remember(size, found.peak)
        if found is not None and found.fits:
            self.low = size
        else:
            self.high, self.fails = size, found is None

    def _remember(self, size: int, peak: Peak) -> None:
        self._reserved[size], self._allocated[size] = peak.reserved, peak.allocated

    def next(self, left: Sequence[int]) -> int:
        if not self.low and self.count == 1:  # the first guess was too large: does any size fit?
            return left[0]
        half = left[len(left) // 2]
        by_line, self._by_line = self._by_line, False
        if self.high and (self.fails or (by_line and self.count > 3)):
            return half
        other = self.high or max((size for size in self._reserved if size < self.low), default=0)
        for known in (self._reserved, self._allocated):  # cached memory may be released
            slope = (known[other] - known[self.low]) / (other - self.low)
            size = self.low + (self._limit - known[self.low]) / slope if slope > 0 else left[-1]
            if self.low < size and (not self.high or size < self.high):
                self._by_line = True
                return left[max(0, bisect.bisect_right(left, size) - 1)]
        return half if self.high else left[0]


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
