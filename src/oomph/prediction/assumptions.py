"""What a trace assumes about values that it cannot know, where there is a choice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

ConditionKey = tuple[str, int, int]  # file, line, the how-manieth time that the line asks
Sizes = Literal["fewest", "typical", "most"]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """`other_answers`: the conditions that get the other answer. `sizes`: how many elements ops select whose
    result depends on values."""

    other_answers: frozenset[ConditionKey] = frozenset()
    sizes: Sizes = "typical"


_current = Assumptions()


def current_assumptions() -> Assumptions:
    return _current


@contextlib.contextmanager
def assuming(assumptions: Assumptions) -> Iterator[None]:
    """For traces that begin inside, also in child processes."""
    global _current
    before, _current = _current, assumptions
    try:
        yield
    finally:
        _current = before
