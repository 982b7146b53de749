"""Events through the allocator: what a run's allocations and frees come to, in milliseconds; and the margin.

The margin says how far the predicted `reserved` may be off, as a share of it.
`python -m benchmarks.accuracy.margins` compares predicted and measured `reserved`
(benchmarks/results/margins.csv). The shares of plain programs and of convolutions come from it; those of the
other classes, of which few or no runs are measured, are estimates. A program of several classes gets the
largest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Literal, NamedTuple

from oomph.gpus import GPU
from oomph.prediction.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemory,
)
from oomph.records import CUDNN_SEARCH, Alive, Allocation, Event, Moment, StepPeak, alive_after
from oomph.units import MiB

_STEP_MARK = re.compile(r"step (\d+)")


class TraceEntry(NamedTuple):
    """One act of the allocator, with addresses: what a memory snapshot is written from."""

    action: Literal["alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap"]
    address: int
    bytes: int  # of the block or the segment
    id: int  # the Allocation that caused it


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator did with the events.

    The peaks are those of the steps, as `torch.cuda.reset_peak_memory_stats` at the start of every step makes
    them; without a step mark, those of the whole run. After a refused request nothing more is replayed.
    """

    peak_allocated: int
    peak_reserved: int
    peak_event: int  # index of the event after which `peak_allocated` is first reached; -1 if there is none
    peak_step: int  # 0 when there are no step marks
    steps: tuple[StepPeak, ...]
    at_peak: tuple[Alive, ...]  # largest first; the bytes add up to peak_allocated
    timeline: tuple[Moment, ...]  # one per allocation and free
    highest_reserved: int  # of the whole run, set-up included: what it takes never to release a segment
    refused: int | None  # id of the Allocation that did not fit the limit
    released: int  # segments, or pages of expandable ones, in the last step, to stay within the limit
    smaller_workspaces: bool  # of convolutions, to stay within the limit
    trace: tuple[TraceEntry, ...] = ()  # empty unless asked for


def replay(
    events: Sequence[Event],
    allocations: Sequence[Allocation],
    limit: int | None = None,
    *,
    settings: AllocatorSettings | None = None,
    record: bool = False,
    rising: bool = False,
    search: bool = True,
) -> Replay:
    """Run the events through a fresh allocator that may reserve `limit` bytes (None: as many as it likes).

    `allocations` is indexed by id. `record` keeps every act of the allocator in `Replay.trace`. `rising`
    places segments at rising addresses, see allocator.py; it changes nothing for expandable segments.
    `search=False` leaves out what cuDNN's search for algorithms takes. A workspace of a convolution that does
    not fit is left out: torch takes cuDNN's next algorithm then (ATen/native/cudnn/Conv_v8.cpp), down to
    those that need little or none.
    An event that contradicts those before it raises ValueError with its index.
    """
    trace: list[TraceEntry] = []
    requester = -1

    def on_segment(action: str, address: int, size: int) -> None:
        trace.append(TraceEntry(action, address, size, requester))  # type: ignore[arg-type]

    settings = settings or AllocatorSettings()
    kind = ExpandableAllocator if settings.expandable_segments else CachingAllocator
    listener = on_segment if record else None
    allocator = kind(limit, max_split=settings.max_split, on_segment=listener, rising=rising)
    malloc, free = allocator.malloc, allocator.free
    alive: dict[int, Block] = {}
    states: list[tuple[int, int, int]] = []
    steps = _Steps(allocator)
    refused: int | None = None
    smaller_workspaces = False

    for index, (action, id, label) in enumerate(events):
        if action == "alloc":
            if id in alive:
                raise ValueError(f"event {index}: alloc of allocation {id}, which is alive")
            requester = id
            one = allocations[id]
            try:
                size = one.bytes if search or one.op != CUDNN_SEARCH else 0
                block = alive[id] = malloc(size, one.stream)
                if record and block.size:
                    trace.append(TraceEntry("alloc", block.address, block.size, id))
            except OutOfMemory:
                if not is_convolution_workspace(one):
                    refused = id
                    break
                alive[id], smaller_workspaces = malloc(0, one.stream), True
        elif action == "free":
            if id not in alive:
                raise ValueError(f"event {index}: free of allocation {id}, which is not alive")
            block = alive.pop(id)
            if record and block.size:
                trace.append(TraceEntry("free", block.address, block.size, id))
            free(block)
            if allocations[id].op == CUDNN_SEARCH:  # torch empties the cache after it
                allocator.empty_cache()
        else:
            if (step := _STEP_MARK.fullmatch(label)) is not None:
                allocator.synchronize()  # the host runs ahead of the GPU by less than a step
                steps.begin(int(step[1]), index)
            elif label == "empty_cache":
                allocator.empty_cache()
            elif label == "synchronize":
                allocator.synchronize()
            elif label == "record_stream":
                alive[id].recorded = True
            continue
        states.append((index, allocator.allocated, allocator.reserved))

    steps.end()
    timeline = tuple(map(partial(tuple.__new__, Moment), states))  # its own constructor takes far longer
    peak_event = steps.peak_event(timeline)
    (alive_at_peak,) = alive_after(events, timeline, [peak_event])
    largest_first = sorted(alive_at_peak.items(), key=lambda item: (-item[1], item[0]))
    return Replay(
        peak_allocated=steps.highest.allocated,
        peak_reserved=max(step.reserved for step in steps.peaks),
        peak_event=peak_event,
        peak_step=steps.highest.step,
        steps=tuple(steps.peaks) if steps.marked else (),
        at_peak=tuple(Alive(size, allocations[id]) for id, size in largest_first if size),
        timeline=timeline,
        highest_reserved=max(map(itemgetter(2), states), default=0),
        refused=refused,
        released=steps.released,
        smaller_workspaces=smaller_workspaces,
        trace=tuple(trace),
    )


class _Steps:
    """The peaks of the steps, taken as a measuring program takes them. Before any mark: one "step 0"."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.peaks: list[StepPeak] = []
        self.marked = False
        self.released = 0  # in the last step that allocates: a function may end after its last one
        self._released_before = 0
        self._allocator = allocator
        self._step = 0
        self._starts: list[Moment] = [Moment(-1, 0, 0)]

    @property
    def highest(self) -> StepPeak:
        return max(self.peaks, key=lambda peak: peak.allocated)  # the first of equals

    def begin(self, step: int, event: int) -> None:
        allocator = self._allocator
        start = Moment(event, allocator.allocated, allocator.reserved)
        if not self.marked and step == 1:  # before it is set-up: measured peaks do not contain it
            self._starts = [start]
        else:  # in a function's own loop the first mark is at the end of step 1
            self._step = self._step or step - 1
            self.end()
            self._starts.append(start)
        self.marked = True
        self._step = step
        self._released_before = allocator.released
        allocator.reset_peak()

    def end(self) -> None:
        allocator = self._allocator
        self.peaks.append(
            StepPeak(self._step, allocator.peak_allocated, allocator.peak_reserved, allocator.allocated)
        )
        if allocator.peak_allocated > self._starts[-1].allocated:
            self.released = allocator.released - self._released_before

    def peak_event(self, timeline: Sequence[Moment]) -> int:
        """The event after which the highest peak is first reached: a step's own mark, if it starts there."""
        highest = self.highest
        start = self._starts[self.peaks.index(highest)]
        if start.allocated == highest.allocated:
            return start.event
        return next(
            event
            for event, allocated, _ in timeline
            if allocated == highest.allocated and event > start.event
        )


def is_convolution_workspace(one: Allocation) -> bool:
    return one.kind == "workspace" and one.op.startswith("aten.convolution")


# ----------------------------------------------------------------------------------------------------- margin

MARGINS = {
    "plain": 0.01,
    "convolutions": 0.03,  # which algorithm cuDNN takes, and with it the workspace, is estimated
    "several streams": 0.02,  # when a block that two streams use is free again depends on the GPU's progress
    "data-dependent shapes": 0.03,  # beside the interval, which holds for other values
    "GPU or torch never measured": 0.03,  # no residuals: kernels and the CUDA context are estimated
    "compiled": 0.05,  # Inductor times kernels in the first step, with memory of its own
}
# One segment more or less, for requests of 1 to 10 MiB, is decided by the order of a few frees.
_SEGMENT = 20 * MiB
_MOST_FOR_SEGMENT = 0.03
_MEASURED_CAPABILITIES = {(9, 0)}
_MEASURED_TORCH = {"2.11", "2.13"}  # measured with 2.11, predicted with both


def margin(
    reserved: int,
    allocations: Sequence[Allocation],
    sizes_assumed: bool,
    compiled: bool,
    card: GPU,
    torch_version: str,
) -> int:
    """Bytes by which the predicted `reserved` may be off, either way."""
    share = max(MARGINS[name] for name in classes(allocations, sizes_assumed, compiled, card, torch_version))
    return min(max(int(share * reserved), _SEGMENT), int(max(share, _MOST_FOR_SEGMENT) * reserved))


def classes(
    allocations: Sequence[Allocation], sizes_assumed: bool, compiled: bool, card: GPU, torch_version: str
) -> Iterator[str]:
    """The classes of programs that the traced one belongs to. `sizes_assumed`: a size depends on values."""
    yield "plain"
    if any(map(is_convolution_workspace, allocations)):
        yield "convolutions"
    if any(one.stream for one in allocations):
        yield "several streams"
    if sizes_assumed:
        yield "data-dependent shapes"
    if compiled:
        yield "compiled"
    version = ".".join(torch_version.split(".")[:2])
    if card.capability not in _MEASURED_CAPABILITIES or version not in _MEASURED_TORCH:
        yield "GPU or torch never measured"
