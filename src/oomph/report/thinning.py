"""A timeline of many thousand moments, cut down to as many as somebody will look at."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from oomph.records import Moment


def thin(timeline: Sequence[Moment], points: int) -> tuple[Moment, ...]:
    """At most `points` moments, in order: the highest of every stretch, and both maxima of the whole."""
    if points < 1:
        raise ValueError(f"a timeline of {points} points cannot be drawn; give 1 or more")
    if len(timeline) <= points:
        return tuple(timeline)
    kept = _highest(timeline, points)
    most_reserved = max(moment.reserved for moment in timeline)
    if points > 1 and all(timeline[i].reserved < most_reserved for i in kept):
        # It falls beside the highest moment of its stretch: one stretch less, to make room for it.
        kept = _highest(timeline, points - 1)
        kept.add(next(i for i, moment in enumerate(timeline) if moment.reserved == most_reserved))
    return tuple(timeline[i] for i in sorted(kept))


def _highest(timeline: Sequence[Moment], stretches: int) -> set[int]:
    """The index of the moment with the most allocated, of each stretch."""
    bounds = [i * len(timeline) // stretches for i in range(stretches + 1)]
    return {max(range(start, end), key=lambda i: timeline[i].allocated) for start, end in pairwise(bounds)}
