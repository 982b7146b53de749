"""Everything that is wrong with a config, in one error; and the name that a misspelt one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from oomph.errors import UserError


class ConfigError(UserError):
    """`problems`: one line each. The message is that line, or a heading and a list of them."""

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = f"{source}: {self.problems[0]}"
        else:
            message = "\n  ".join([f"{source} has {len(self.problems)} problems:", *self.problems])
        super().__init__(message)


class Problems:
    """Collects lines; a key is complained about once."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines: dict[str, str] = {}
        # canonical key -> as it was written, where that was another name for it
        self.written: dict[str, str] = {}

    def add(self, key: str, what: str) -> None:
        """`what` follows the key: "is not a key; ..."."""
        self._lines.setdefault(key, f"{self._shown(key)} {what}")

    def refuse(self, key: str, given: object, advice: str) -> None:
        if key not in self._lines:
            self._lines[key] = f"{self._shown(key)} = {_short(given)} is not valid; {advice}"

    def fine(self, *keys: str) -> bool:
        return not any(key in self._lines for key in keys)

    def raise_any(self) -> None:
        if self._lines:
            raise ConfigError(self.source, self._lines.values())

    def _shown(self, key: str) -> str:
        written = self.written.get(key, key)
        return key if written == key else f"{written} (which is {key})"


def nearest(name: str, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(name, list(known), n=1)
    return close[0] if close else None


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}..."
