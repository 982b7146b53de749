"""Fixes as people write them: `name`, `name:option=value,option=value`, or a JSON file of recorded fixes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomph.errors import UserError
from oomph.fixes.catalogue import find
from oomph.records import FixUse

VALID = "give name, name:option=value,option=value, or a .json file with rows of `oomph fixes --json`"


def parse_fixes(words: Sequence[str]) -> list[FixUse]:
    return [use for word in words for use in (_from_file(word) if word.endswith(".json") else [_parse(word)])]


def _parse(word: str) -> FixUse:
    name, _, rest = word.partition(":")
    find(name.strip())  # a wrong name is told before a program is loaded
    options: dict[str, Any] = {}
    for pair in _split(rest):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"fix {word!r}: {pair!r} is not option=value; {VALID}")
        options[key.strip()] = _value(value.strip())
    return FixUse(name.strip(), options)


def _split(text: str) -> list[str]:
    """At commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # a word


def _is_a_fix(row: Any) -> bool:
    return isinstance(row, str) or (isinstance(row, dict) and "fix" in row)


def _from_file(file: str) -> list[FixUse]:
    try:
        found = json.loads(Path(file).read_text())
    except OSError as error:
        raise UserError(f"file {file!r} cannot be read: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"file {file!r} is not JSON: {error}") from None
    rows = found.get("fixes") if isinstance(found, dict) else found
    if rows == []:
        raise UserError(f"file {file!r} holds an empty list; give at least one fix")
    if not isinstance(rows, list) or not all(map(_is_a_fix, rows)):
        raise UserError(
            f'file {file!r} holds no list of fixes; it should be [{{"fix": ..., "options": ...}}] or words'
        )
    return [
        _parse(row) if isinstance(row, str) else FixUse(row["fix"], dict(row.get("options") or {}))
        for row in rows
    ]
