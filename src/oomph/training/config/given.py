"""What a file and its overrides say, as canonical keys with their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from oomph.training.config.problems import Problems
from oomph.training.config.schema import SECTIONS, Schema, converted

# Of these only one is meant: an override of one takes the place of the file's other.
_EITHER = (("data.batch_size", "data.batch_tokens"), ("training.steps", "training.epochs"))

Written = list[tuple[str, Any]]


def flat(mapping: Mapping[str, Any], problems: Problems) -> Written:
    """A file's mapping as dotted keys. Below a section's keys, only `optimization` has keys of its own."""
    found: Written = []
    for key, value in mapping.items():
        if key in (*SECTIONS, "model", "optimization"):
            found += _below(key, value, problems)
        else:
            found.append((key, value))
    return found


def _below(section: str, value: Any, problems: Problems) -> Written:
    if value is None:  # a heading without anything under it
        return []
    if not isinstance(value, Mapping):
        problems.refuse(section, value, "give a mapping of keys")
        return []
    found: Written = []
    for key, inner in value.items():
        name = f"{section}.{key}"
        found += _below(name, inner, problems) if key == "optimization" else [(name, inner)]
    return found


def canonical(written: Iterable[tuple[str, Any]], schema: Schema, problems: Problems) -> dict[str, Any]:
    """Every key by its own name. Two names of one key must agree."""
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for key, value in written:
        target = schema.find(key)
        if target is None:
            problems.add(key, f"is not a key; {schema.hint(key)}")
            continue
        value = converted(target, value)
        if target in found and names[target] != key and found[target] != value:
            both = f"as {names[target]} = {found[target]!r} and as {key} = {value!r}"
            problems.add(target, f"is given twice, {both}; give it once")
            continue
        found[target], names[target] = value, key
        problems.written[target] = key
    return found


def merged(file: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values, with the overrides in their place."""
    left = dict(file)
    for group in _EITHER:
        if any(overrides.get(key) is not None for key in group):
            for key in group:
                left.pop(key, None)
    if "form" in overrides and overrides["form"] != file.get("form", "model"):
        left.pop("fixes", None)  # they are remedies for the file's own form
    return {**left, **overrides}
