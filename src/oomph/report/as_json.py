"""A Prediction as one JSON object, schema 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from oomph.records import STAGES, Alive, Allocation, Moment, Note, Peak, Prediction, Site, StepPeak

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
        "peak": {**sizes_to_json(peak), "step": peak.step, "stage": peak.stage, **site_to_json(peak.site)},
        "needed": sizes_to_json(prediction.needed),
        "fits": prediction.fits,
        "verdict": prediction.verdict,
        "margin": prediction.margin,
        "interval": None
        if prediction.interval is None
        else {"low": sizes_to_json(prediction.interval.low), "high": sizes_to_json(prediction.interval.high)},
        "assumptions": [_note(note) for note in prediction.assumptions],
        "refused": None if prediction.refused is None else _allocation(prediction.refused),
        "steps": [asdict(one) for one in prediction.steps],
        "stages": [{"stage": stage, "bytes": size} for stage, size in prediction.by_stage()],
        "modules": [{"module": module, "bytes": size} for module, size in prediction.by_module()],
        "lines": [
            {**site_to_json(site), "bytes": size}
            | ({"caller": _file_and_line(site.caller)} if site.caller else {})
            for site, size in prediction.by_line()
        ],
        "at_peak": [_alive(alive) for alive in prediction.at_peak],
        "timeline": [moment._asdict() for moment in downsample(prediction.timeline, _TIMELINE_POINTS)],
        "batch": [{**one._asdict(), "shape": list(one.shape)} for one in prediction.batch],
        "findings": [],
        "notes": [_note(note) for note in prediction.notes],
        "seconds": round(prediction.seconds, 3),
        "step_seconds": prediction.step_seconds,
    }


def prediction_from_json(found: Any) -> Prediction:
    """What the object holds: the peak and its tensors, the timeline, the verdict. Events are not in it.

    Raises KeyError, TypeError or ValueError for what is not such an object.
    """
    if found["schema"] != SCHEMA:
        raise ValueError(f"schema {found['schema']!r} is not {SCHEMA}")
    allocations = tuple(_allocation_from_json(id, one) for id, one in enumerate(found["at_peak"]))
    peak = found["peak"]
    needed = found.get("needed", peak)
    return Prediction(
        gpu=found["gpu"],
        gpu_title=str(found["gpu"] or ""),
        capacity=found["capacity"],
        limit=found["limit"],
        verdict=found["verdict"],
        refused=None if found["refused"] is None else _allocation_from_json(-1, found["refused"]),
        peak=Peak(
            int(peak["allocated"]),
            int(peak["reserved"]),
            int(peak["device"]),
            int(peak["step"]),
            peak["stage"],
            _site_from_json(peak),
        ),
        steps=tuple(
            StepPeak(*(int(one[key]) for key in ("step", "allocated", "reserved", "end", "device")))
            for one in found["steps"]
        ),
        at_peak=tuple(Alive(one.bytes, one) for one in allocations),
        timeline=tuple(
            Moment(*(int(one[key]) for key in ("event", "allocated", "reserved")))
            for one in found["timeline"]
        ),
        events=(),
        allocations=allocations,
        notes=tuple(Note(str(one["text"]), _site_from_json(one)) for one in found["notes"]),
        seconds=float(found["seconds"]),
        step_seconds=found["step_seconds"],
        margin=int(found["margin"]),
        without_search=None if needed.items() <= peak.items() else Peak(**needed),
    )


def _allocation_from_json(id: int, one: Any) -> Allocation:
    if one["stage"] not in STAGES:
        raise ValueError(f"stage {one['stage']!r}")
    shape = tuple(int(each) for each in one["shape"])
    dtype, op, module = (str(one[key]) for key in ("dtype", "op", "module"))
    site, stage, kind = _site_from_json(one), one["stage"], one["kind"]
    return Allocation(id, int(one["bytes"]), shape, dtype, op, module, site, stage, kind, step=0)


def _site_from_json(one: Any) -> Site | None:
    if one.get("file") is None:
        return None
    return Site(str(one["file"]), int(one["line"]), str(one.get("function") or ""))


def sizes_to_json(peak: Peak) -> dict[str, int]:
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
        **site_to_json(one.site),
        "stage": one.stage,
        "kind": one.kind,
    }


def _file_and_line(site: Site | None) -> dict[str, Any]:
    return {"file": site and site.file, "line": site and site.line}


def site_to_json(site: Site | None) -> dict[str, Any]:
    return {**_file_and_line(site), "function": site and site.function}
