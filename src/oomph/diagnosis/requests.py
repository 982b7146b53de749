"""Requests of a prediction that an error's text may be of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from oomph.prediction.allocator import MIN_BLOCK, round_up, segment_size
from oomph.records import Allocation, Prediction
from oomph.units import GiB, MiB


def requests_of_size(
    prediction: Prediction, requested: int | None, lines: Sequence[tuple[str, int]], phase: str
) -> list[Allocation]:
    """One of each line, shape and op: those of `lines` (files and lines, innermost first) come first, then
    those of the phase, as "the loss" or "backward", then that which fails in the prediction, then the last.

    Messages round to two decimals, and name the size of the segment that the allocator asks CUDA for.
    """
    if requested is None:
        return []
    half = 0.0051 * (GiB if requested >= GiB else MiB)
    places = [(PurePath(file).name, line) for file, line in lines]
    during = next(iter(phase.removeprefix("the ").replace(",", "").split()), "")

    refused = prediction.refused

    def order(one: Allocation) -> tuple[int, bool, bool]:
        sites = (one.site, one.site and one.site.caller)
        found = [(PurePath(site.file).name, site.line) for site in sites if site]
        nearest = min((places.index(each) for each in found if each in places), default=len(places))
        fails = refused is not None and (refused.site, refused.op) == (one.site, one.op)
        return nearest, during not in (one.during or one.stage), not fails

    found = [one for one in reversed(prediction.allocations) if abs(_asked(one) - requested) <= half]
    kinds = {(one.site, one.shape, one.dtype, one.op): one for one in sorted(found, key=order, reverse=True)}
    return sorted(kinds.values(), key=order)


def _asked(one: Allocation) -> int:
    return segment_size(round_up(one.bytes, MIN_BLOCK))
