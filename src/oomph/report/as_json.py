"""A Prediction as one JSON object, schema 1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from oomph.records import Alive, Allocation, Moment, Note, Peak, Prediction, Site

SCHEMA = 1
_TIMELINE_POINTS = 400


def prediction_to_json(prediction: Prediction) -> dict[str, Any]:
    """Plain dicts, lists, strings and numbers; sizes in bytes, files as they were traced."""
    peak = prediction.peak
    return {
        "schema": SCHEMA,
        "gpu": prediction.gpu,
        "capacity": prediction.capacity,
        "limit": prediction.limit,
        "peak": {
            **_sizes(peak),
            "step": peak.step,
            "stage": peak.stage,
            **_site(peak.site),
        },
        "fits": prediction.fits,
        "verdict": prediction.verdict,
        "margin": prediction.margin,
        "interval": None
        if prediction.interval is None
        else {"low": _sizes(prediction.interval.low), "high": _sizes(prediction.interval.high)},
        "assumptions": [_note(note) for note in prediction.assumptions],
        "refused": None if prediction.refused is None else _allocation(prediction.refused),
        "steps": [
            {
                "step": one.step,
                "allocated": one.allocated,
                "reserved": one.reserved,
                "device": one.device,
                "end": one.end,
            }
            for one in prediction.steps
        ],
        "stages": [{"stage": stage, "bytes": size} for stage, size in prediction.by_stage()],
        "modules": [{"module": module, "bytes": size} for module, size in prediction.by_module()],
        "lines": [{**_site(site), "bytes": size} for site, size in prediction.by_line()],
        "at_peak": [_alive(alive) for alive in prediction.at_peak],
        "timeline": [moment._asdict() for moment in downsample(prediction.timeline, _TIMELINE_POINTS)],
        "batch": [{**one._asdict(), "shape": list(one.shape)} for one in prediction.batch],
        "findings": [],
        "notes": [_note(note) for note in prediction.notes],
        "seconds": round(prediction.seconds, 3),
        "step_seconds": prediction.step_seconds,
    }


def _sizes(peak: Peak) -> dict[str, int]:
    return {"allocated": peak.allocated, "reserved": peak.reserved, "device": peak.device}


def _note(note: Note) -> dict[str, Any]:
    return {"text": note.text, **_file_and_line(note.site)}


def downsample(timeline: Sequence[Moment], points: int) -> tuple[Moment, ...]:
    """At most `points` moments, in order: the highest of each interval, and both maxima of the whole."""
    if points < 1:
        raise ValueError(f"a timeline of {points} points cannot be drawn; give 1 or more")
    if len(timeline) <= points:
        return tuple(timeline)
    chosen = _highest_of_intervals(timeline, points)
    most_reserved = max(moment.reserved for moment in timeline)
    if points > 1 and all(timeline[i].reserved < most_reserved for i in chosen):
        # It is not the highest moment of its interval: use one interval fewer, to make room for it.
        chosen = _highest_of_intervals(timeline, points - 1)
        chosen.add(next(i for i, moment in enumerate(timeline) if moment.reserved == most_reserved))
    return tuple(timeline[i] for i in sorted(chosen))


def _highest_of_intervals(timeline: Sequence[Moment], intervals: int) -> set[int]:
    bounds = [i * len(timeline) // intervals for i in range(intervals + 1)]
    return {max(range(start, end), key=lambda i: timeline[i].allocated) for start, end in pairwise(bounds)}


def _alive(alive: Alive) -> dict[str, Any]:
    """At the peak, a tensor counts with the size of its block, which the allocator rounds up."""
    return {**_allocation(alive.allocation), "bytes": alive.bytes}


def _allocation(one: Allocation) -> dict[str, Any]:
    return {
        "bytes": one.bytes,
        "shape": list(one.shape),
        "dtype": one.dtype,
        "op": one.op,
        "module": one.module,
        **_site(one.site),
        "stage": one.stage,
        "kind": one.kind,
    }


def _file_and_line(site: Site | None) -> dict[str, Any]:
    return {"file": site and site.file, "line": site and site.line}


def _site(site: Site | None) -> dict[str, Any]:
    return {**_file_and_line(site), "function": site and site.function}
