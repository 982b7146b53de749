"""Plans as files: JSON that people can read and edit, applied with `--plan` or `oomph.apply`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from oomph.errors import UserError
from oomph.fixes.registry import uses_of
from oomph.records import Plan

SCHEMA = 1
# Not stored: what is for this process alone, and where in a step a peak is.
_LEFT_OUT = {"FixUse": {"model_id"}, "Peak": {"step", "stage", "site"}}
_VALID = "give a file that `oomph fit TARGET --plan FILE` wrote"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """`fixes` alone is needed to apply it; the rest says what it was made for, and what was predicted."""
    return {"schema": SCHEMA, **_written(plan)}


def _written(value: Any) -> Any:
    if is_dataclass(value):
        left_out = _LEFT_OUT.get(type(value).__name__, ())
        names = [field.name for field in fields(value) if field.name not in left_out]
        return {name: _written(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: _written(each) for name, each in value.items()}
    return [_written(each) for each in value] if isinstance(value, tuple | list) else value


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
        return _read(Plan, {**content, "fixes": fixes})
    except ValueError as error:
        raise UserError(f"plan {str(file)!r} is incomplete ({error}); {_VALID}") from None


def _read(kind: Any, value: Any, where: str = "") -> Any:
    """`value`, of a JSON file, as the type that a record's field has. ValueError names the field."""
    at = f"{where}." if where else ""
    if is_dataclass(kind) and isinstance(value, dict):
        types, given = get_type_hints(kind), {}
        for field in fields(kind):
            if field.name in value:
                given[field.name] = _read(types[field.name], value[field.name], f"{at}{field.name}")
            elif field.default is MISSING and field.default_factory is MISSING:
                raise ValueError(f"{at}{field.name} is missing")
        return kind(**given)  # type: ignore[operator]
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_read(kinds[0], each, f"{at}{index}") for index, each in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return {name: _read(kinds[1], each, f"{at}{name}") for name, each in value.items()}
    if kind is Any:
        return value
    if NoneType in kinds:
        return None if value is None else _read(kinds[0], value, where)
    if origin is Literal and value in kinds:
        return value
    plain = origin or ((int, float) if kind is float else kind)
    is_other = isinstance(value, bool) and kind is not bool  # which are numbers in Python
    if origin in (tuple, Literal) or is_other or not isinstance(value, plain):
        raise ValueError(f"{where} = {value!r:.40} is not valid")
    return value
