"""A Prediction as one JSON object, schema 1."""

from __future__ import annotations

from typing import Any

from oomph.records import Alive, Allocation, Prediction, Site
from oomph.report.thinning import thin

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
            "allocated": peak.allocated,
            "reserved": peak.reserved,
            "device": peak.device,
            "step": peak.step,
            "stage": peak.stage,
            **_site(peak.site),
        },
        "fits": prediction.fits,
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
        "timeline": [moment._asdict() for moment in thin(prediction.timeline, _TIMELINE_POINTS)],
        "findings": [],
        "notes": [
            {
                "text": note.text,
                "file": note.site.file if note.site else None,
                "line": note.site.line if note.site else None,
            }
            for note in prediction.notes
        ],
        "seconds": round(prediction.seconds, 3),
        "step_seconds": prediction.step_seconds,
    }


def _alive(alive: Alive) -> dict[str, Any]:
    """At the peak, a tensor counts for the bytes its block takes rather than those it asked for."""
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


def _site(site: Site | None) -> dict[str, Any]:
    if site is None:
        return {"file": None, "line": None, "function": None}
    return {"file": site.file, "line": site.line, "function": site.function}
