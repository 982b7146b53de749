"""The section `model`: a preset of the system, and fields of its config dataclass that replace its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from oomph.systems.config_checks import InvalidConfig
from oomph.training.config.problems import Problems, nearest
from oomph.training.config.schema import Schema
from oomph.training.config.section import read_value


def read_model(schema: Schema, values: Mapping[str, Any], problems: Problems) -> tuple[str, Any]:
    """The preset's name and the built dataclass. `values`: dotted keys below `model`.

    Where something is wrong the dataclass is the preset's, or what could be made of the right fields.
    """
    system = schema.system
    name = values.get("preset", system.preset)
    if not isinstance(name, str) or name not in system.presets:
        close = nearest(name, system.presets) if isinstance(name, str) else None
        valid = ", ".join(system.presets)
        said = f"did you mean {close!r}? {system.name} has" if close else f"{system.name} has"
        problems.refuse("model.preset", name, f"{said} {valid}")
        name = system.preset
    typed = {
        key: read_value(hint, values[key], f"model.{key}", problems)
        for key, hint in schema.model_keys.items()
        if key in values
    }
    right = {key: value for key, value in typed.items() if problems.fine(f"model.{key}")}
    return name, _replaced(system.presets[name], right, "model", problems)


def _replaced(config: Any, values: Mapping[str, Any], place: str, problems: Problems) -> Any:
    """`config` with the values in, those of dataclasses inside it too; problems of both are collected."""
    own = {key: value for key, value in values.items() if "." not in key}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        field, dot, rest = key.partition(".")
        if dot:
            inner.setdefault(field, {})[rest] = value
    for field, parts in inner.items():
        below = getattr(config, field)
        assert is_dataclass(below)
        own[field] = _replaced(below, parts, f"{place}.{field}", problems)
    try:
        return replace(config, **own)
    except InvalidConfig as error:
        for problem in error.problems:
            problems.refuse(f"{place}.{problem.field}", problem.given, problem.advice)
        refused = {problem.field for problem in error.problems}
        right = {key: value for key, value in values.items() if key.partition(".")[0] not in refused}
        return _replaced(config, right, place, problems) if len(right) < len(values) else config
