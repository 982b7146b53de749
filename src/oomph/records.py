"""The passive data that the rooms hand to each other. Frozen, free of torch, and in bytes throughout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

K = TypeVar("K")

Stage = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "batch",
    "forward activations",
    "loss",
    "backward",
    "optimizer step",
    "workspace",
]
Kind = Literal[
    "parameter", "buffer", "gradient", "optimizer state", "batch", "activation", "temporary", "workspace"
]
STAGES: tuple[Stage, ...] = Stage.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Site:
    """A line of the user's own source."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """One request to the allocator: a tensor's storage, or an operator's workspace."""

    id: int
    bytes: int  # as requested; the allocator may hand out a larger block
    shape: tuple[int, ...]
    dtype: str
    op: str  # "aten.mm", "optimizer", "cublas workspace", ...
    module: str  # "model.layers.3.mlp"; "" outside every module
    site: Site | None  # for backward allocations, the forward line that caused them
    stage: Stage
    kind: Kind
    step: int  # 0 before the first step, then 1, 2, 3
    saved: bool = False  # made in forward and still alive when backward began
    during: Stage | None = None  # what the program was doing when it was made; `stage` says what it became


class Event(NamedTuple):
    """One moment of the run, in program order. Edit a list of these and replay it.

    `alloc` and `free` carry the id of an Allocation. `mark` carries a label, and an id of -1:
    "step 2", "forward", "backward", "optimizer", "empty_cache", "enter layers.3", "exit layers.3".
    """

    action: Literal["alloc", "free", "mark"]
    id: int
    label: str = ""


class Alive(NamedTuple):
    """An allocation alive at some moment, with the bytes its block really takes."""

    bytes: int
    allocation: Allocation


class Moment(NamedTuple):
    """The allocator's state after one event."""

    event: int
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The high-water mark: tensors / caching allocator / plus the CUDA context."""

    allocated: int
    reserved: int
    device: int
    step: int = 0
    stage: Stage | None = None  # what the program was doing at the peak
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The high-water mark of one optimizer step, and what was left after it."""

    step: int
    allocated: int
    reserved: int
    end: int
    device: int = 0  # reserved, and the CUDA context


@dataclass(frozen=True, slots=True)
class Note:
    """Something the trace could not know, or that the reader should."""

    text: str
    site: Site | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The memory of a training step over time, and every tensor alive at its peak."""

    gpu: str | None  # catalogue name, or the size that was given
    gpu_title: str
    capacity: int | None  # what the card has, as torch reports it; None when no GPU was named
    limit: int | None  # what the allocator may reserve: capacity less context, or --max
    fits: bool | None  # None when there is no limit
    refused: Allocation | None  # the request that the limited allocator could not serve
    peak: Peak
    steps: tuple[StepPeak, ...]
    at_peak: tuple[Alive, ...]  # largest first; the bytes add up to peak.allocated
    timeline: tuple[Moment, ...]
    events: tuple[Event, ...]
    allocations: tuple[Allocation, ...]  # by id
    notes: tuple[Note, ...] = ()
    seconds: float = 0.0

    def by_stage(self) -> list[tuple[Stage, int]]:
        """Bytes at the peak per stage, in the order of STAGES."""
        totals = _sum((alive.allocation.stage, alive.bytes) for alive in self.at_peak)
        return [(stage, totals[stage]) for stage in STAGES if stage in totals]

    def by_module(self) -> list[tuple[str, int]]:
        """Bytes at the peak per module path, largest first."""
        return _largest(_sum((alive.allocation.module, alive.bytes) for alive in self.at_peak))

    def by_line(self) -> list[tuple[Site, int]]:
        """Bytes at the peak per source line, largest first."""
        totals = _sum((alive.allocation.site, alive.bytes) for alive in self.at_peak)
        return [(site, size) for site, size in _largest(totals) if site is not None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """The same figures read off a real GPU."""

    gpu_title: str
    torch: str
    peak: Peak
    steps: tuple[StepPeak, ...]
    before: int  # allocated before the first step: model and batch
    seconds_per_step: float = 0.0
    extra: dict[str, str] = field(default_factory=dict)


def _sum(pairs: Iterable[tuple[K, int]]) -> dict[K, int]:
    totals: dict[K, int] = {}
    for key, size in pairs:
        totals[key] = totals.get(key, 0) + size
    return totals


def _largest(totals: dict[K, int]) -> list[tuple[K, int]]:
    return sorted(totals.items(), key=lambda item: -item[1])
