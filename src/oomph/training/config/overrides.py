"""Overrides: `key=value` with a YAML value, and the reports' own `--key value` and `--flag`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from oomph.errors import UserError
from oomph.training.config.reading import parse

_KEY_AND_VALUE = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)=(.*)", re.DOTALL)


def is_override(word: str) -> bool:
    """Whether it is key=value. Not so a fix: `activation_checkpointing:keep=products`."""
    return _KEY_AND_VALUE.fullmatch(word) is not None


def parse_override(word: str) -> tuple[tuple[str, ...], Any]:
    """`data.seq_len=128` -> (("data", "seq_len"), 128)."""
    match = _KEY_AND_VALUE.fullmatch(word)
    if match is None:
        raise UserError(f"override {word!r} is not key=value, e.g. data.batch_size=8")
    key, value = match.groups()
    if not value.strip():
        raise UserError(f"override {word!r} has no value; write {key}=null if none is meant")
    return tuple(key.replace("-", "_").split(".")), _value(value.strip(), f"override {word!r}")


def _value(text: str, what: str) -> Any:
    """YAML, but for words that a command line has no other use for: a pattern, *.txt, and a # in a name."""
    if text.startswith("*"):
        return text
    found = parse(text, what)
    return text if isinstance(found, str) and " #" in text and text[0] not in "'\"" else found


def overrides_from_words(words: Iterable[str]) -> tuple[str, ...]:
    """The overrides that the words after a config stand for.

    `--vocab_size 10000`, `--vocab-size=10000` and `vocab_size=10000` are the same; a flag without a value,
    `--sparse`, is true.
    """
    found: list[str] = []
    waiting: str | None = None  # a flag that the next word may be the value of
    for word in words:
        if word.startswith("--"):
            if waiting is not None:
                found.append(f"{waiting}=true")
            key, equals, value = word[2:].partition("=")
            waiting = None if equals else key
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", key):
                raise UserError(f"{word!r} is not a flag; give --key value, --flag, or key=value")
            if equals:
                found.append(f"{key}={value}")
        elif is_override(word):
            if waiting is not None:
                found.append(f"{waiting}=true")
                waiting = None
            found.append(word)
        elif waiting is not None:
            found.append(f"{waiting}={word}")
            waiting = None
        else:
            also = "; configs are taken one at a time" if word.endswith((".yaml", ".yml")) else ""
            raise UserError(f"{word!r} is not an override; give key=value, --key value, or --flag{also}")
    if waiting is not None:
        found.append(f"{waiting}=true")
    return tuple(found)
