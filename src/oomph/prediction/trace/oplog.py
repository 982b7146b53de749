"""The log of ops of a trace, to lay beside the log of a real GPU run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch._ops import OpOverload

Describe = Callable[[Any], str]  # an op's result in words


class LoggedOp(NamedTuple):
    op: str
    outputs: str
    phase: str  # "setup", "step 2 backward"
    first_event: int  # events[first_event:last_event] happened inside the op
    last_event: int


class OpLog:
    def __init__(self, describe: Describe) -> None:
        self.rows: list[LoggedOp] = []
        self._describe = describe

    def add(self, func: OpOverload, out: Any, phase: str, first_event: int, last_event: int) -> None:
        self.rows.append(LoggedOp(str(func), self._describe(out), phase, first_event, last_event))
