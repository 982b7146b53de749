"""The log of ops of a trace, to lay beside the log of a real GPU run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from oomph.prediction.trace.ledger import Ledger


class LoggedOp(NamedTuple):
    op: str
    outputs: str
    phase: str
    first_event: int  # events[first_event:last_event] happened inside the op
    last_event: int


class OpLog:
    def __init__(self, ledger: Ledger) -> None:
        self.rows: list[LoggedOp] = []
        self._ledger = ledger
        self._began: list[int] = []

    def begin(self, func: OpOverload) -> None:
        self._began.append(len(self._ledger.events))

    def end(self, func: OpOverload, out: Any, phase: str = "") -> None:
        results = out if isinstance(out, (list, tuple)) else [out]
        text = " ".join(_describe(item) for item in results if isinstance(item, torch.Tensor))
        self.rows.append(LoggedOp(str(func), text, phase, self._began.pop(), len(self._ledger.events)))


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
