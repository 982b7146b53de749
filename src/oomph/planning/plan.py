"""Plans as files: JSON that people can read and edit, applied with `--plan` or `oomph.apply`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from oomph.errors import UserError
from oomph.fixes.registry import uses_of
from oomph.records import Plan

SCHEMA = 1
_PLANS = TypeAdapter(Plan)
_USE = {"__all__": {"model_id"}}
_PRICED = {"fixes": _USE, "peak": {"step", "stage", "site"}}
_NOT_STORED: Any = {"fixes": _USE, "before": _PRICED, "after": _PRICED, "front": {"__all__": _PRICED}}
_VALID = "give a file that `oomph fit TARGET --plan FILE` wrote"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """`fixes` alone is needed to apply it; the rest says what it was made for, and what was predicted."""
    return {"schema": SCHEMA, **_PLANS.dump_python(plan, mode="json", exclude=_NOT_STORED)}


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
    fixes = uses_of(content["fixes"])
    try:
        return _PLANS.validate_python({**content, "fixes": fixes})
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"plan {str(file)!r} is incomplete ({problem}); {_VALID}") from None
