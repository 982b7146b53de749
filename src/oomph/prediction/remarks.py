"""What the reader of a prediction should know beside its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oomph.gpus import GPU
from oomph.prediction.replay import Replay
from oomph.records import Allocation, Event, Growth, Note, Site
from oomph.units import MiB, format_bytes


def remarks(
    card: GPU, named: bool, growth: Growth | None, allocations: Sequence[Allocation]
) -> Iterator[Note]:
    if not named or card.bandwidth is None:
        yield Note("the GPU's generation is not known: kernels are assumed to be those of an H200 (sm_90)")
    if any(one.kind == "workspace" and one.op.startswith("aten.convolution") for one in allocations):
        yield Note("convolution workspaces are estimated: which algorithm cuDNN takes cannot be known")
    if growth is not None:
        grown = format_bytes(growth.bytes)
        yield Note(f"memory grows by {grown} with every step: something keeps what a step made", growth.site)


def growth_of(run: Replay, events: Sequence[Event], allocations: Sequence[Allocation]) -> Growth | None:
    """A step that leaves more behind than the one before will not fit for ever."""
    if len(run.steps) < 3:
        return None
    growth = run.steps[-1].end - run.steps[-2].end
    if growth < MiB or run.steps[-2].end - run.steps[-3].end < MiB:
        return None
    alive: set[int] = set()
    for event in events:
        if event.action == "alloc":
            alive.add(event.id)
        elif event.action == "free":
            alive.discard(event.id)
    kept: dict[Site | None, int] = {}
    for id in alive:
        if allocations[id].step == run.steps[-2].step:
            kept[allocations[id].site] = kept.get(allocations[id].site, 0) + allocations[id].bytes
    if not kept:  # only the last batch was longer than the one before
        return None
    return Growth(growth, max(kept, key=lambda site: kept[site]))
