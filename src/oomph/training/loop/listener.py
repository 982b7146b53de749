"""What a run tells while it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepReport:
    """Bytes, on a GPU, are the allocator's and those of recorded passes; norm is that of all gradients,
    before clipping."""

    step: int
    loss: float
    learning_rate: float
    norm: float | None
    tokens_per_second: float
    allocated: int | None
    peak: int | None

    def numbers(self) -> dict[str, float | None]:
        return {
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.norm,
            "tokens_per_second": self.tokens_per_second,
            "memory": self.allocated,
            "memory_peak": self.peak,
        }


class Listener(Protocol):
    """The command line shows it; tests write it down."""

    def stepped(self, report: StepReport) -> None: ...
    def advanced(self, step: int, loss: float) -> None: ...
    def evaluated(self, step: int, found: dict[str, float]) -> None: ...
    def sampled(self, step: int, sample: str) -> None: ...
    def said(self, message: str) -> None: ...


class Silent:
    """Says nothing."""

    def stepped(self, report: StepReport) -> None: ...
    def advanced(self, step: int, loss: float) -> None: ...
    def evaluated(self, step: int, found: dict[str, float]) -> None: ...
    def sampled(self, step: int, sample: str) -> None: ...
    def said(self, message: str) -> None: ...
