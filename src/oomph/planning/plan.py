"""Plans as files: JSON that people can read and edit, applied with `--plan` or `oomph.apply`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oomph.errors import UserError
from oomph.fixes.registry import uses_of
from oomph.records import FIX_KINDS, FixUse, Peak, Plan, PricedFixes

SCHEMA = 1
_VALID = "give a file that `oomph fit TARGET --plan FILE` wrote"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """`fixes` alone is needed to apply it; the rest says what it was made for, and what was predicted."""
    return {
        "schema": SCHEMA,
        "fixes": [_use_to_json(use) for use in plan.fixes],
        "fits": plan.fits,
        "gpu": plan.gpu,
        "gpu_title": plan.gpu_title,
        "limit": plan.limit,
        "model": plan.model,
        "model_id": plan.model_id,
        "before": _priced_to_json(plan.before),
        "after": _priced_to_json(plan.after),
        "allowed": list(plan.allowed),
        "conditions": list(plan.conditions),
        "needs": list(plan.needs),
        "reason": plan.reason,
        "front": [_priced_to_json(each) for each in plan.front],
        "predictions": plan.predictions,
        "seconds": plan.seconds,
    }


def write_plan(plan: Plan, file: str | Path) -> None:
    try:
        Path(file).write_text(json.dumps(plan_to_json(plan), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"plan {str(file)!r} cannot be written: {error.strerror or error}") from None


def check_overwritten(file: str | Path) -> None:
    """UserError for a file that exists and is not a plan."""
    path = Path(file)
    if not path.exists():
        return
    try:
        content = json.loads(path.read_text())
        is_plan = isinstance(content, dict) and "schema" in content and "fixes" in content
    except (OSError, ValueError, RecursionError):
        is_plan = False
    if not is_plan:
        raise UserError(
            f"{str(file)!r} exists and is not a plan, so it is not overwritten; give another name"
        )


def read_plan(file: str | Path) -> Plan:
    """The plan of a file; its fixes and their options are checked."""
    try:
        content = json.loads(Path(file).read_text())
    except OSError as error:
        raise UserError(f"plan {str(file)!r} cannot be read: {error.strerror or error}; {_VALID}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"plan {str(file)!r} is not JSON: {error}; {_VALID}") from None
    if not isinstance(content, dict) or not isinstance(content.get("fixes"), list):
        raise UserError(f"plan {str(file)!r} is not a plan; {_VALID}")
    if content.get("schema") != SCHEMA:
        raise UserError(
            f"plan {str(file)!r} has schema {content.get('schema')!r}, and this release reads {SCHEMA}; "
            "make it again with `oomph fit`"
        )
    fixes = tuple(uses_of(content["fixes"]))
    try:
        return Plan(
            fixes=fixes,
            fits=bool(content["fits"]),
            gpu=str(content["gpu"]),
            gpu_title=str(content["gpu_title"]),
            limit=int(content["limit"]),
            before=_priced(content["before"]),
            after=_priced(content["after"]),
            allowed=tuple(kind for kind in FIX_KINDS if kind in content["allowed"]),
            model=str(content["model"]),
            front=tuple(map(_priced, content["front"])),
            conditions=tuple(map(str, content["conditions"])),
            needs=tuple(kind for kind in FIX_KINDS if kind in content["needs"]),
            model_id=str(content.get("model_id", "")),
            reason=str(content.get("reason", "")),
            predictions=int(content["predictions"]),
            seconds=float(content["seconds"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"plan {str(file)!r} is incomplete ({error!r}); {_VALID}") from None


def _priced_to_json(priced: PricedFixes) -> dict[str, Any]:
    peak = {key: getattr(priced.peak, key) for key in ("allocated", "reserved", "device")}
    fixes = [_use_to_json(use) for use in priced.fixes]
    return {**asdict(priced), "fixes": fixes, "peak": peak}


def _use_to_json(use: FixUse) -> dict[str, Any]:
    return {"fix": use.fix, "options": dict(use.options)}


def _priced(content: Mapping[str, Any]) -> PricedFixes:
    allocated, reserved, device = (int(content["peak"][key]) for key in ("allocated", "reserved", "device"))
    return PricedFixes(
        tuple(uses_of(content["fixes"])),
        Peak(allocated, reserved, device),
        bool(content["fits"]),
        float(content["step_seconds"]),
        float(content["slowdown"]),
        int(content["host_bytes"]),
        bool(content.get("estimated")),
    )
