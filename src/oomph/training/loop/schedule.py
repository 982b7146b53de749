"""The learning rate of each step, as a share of the full one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oomph.training.config import TrainingConfig


@dataclass(frozen=True)
class Schedule:
    """A linear rise over `warmup` steps, then constant, or down to `floor` at the last of `steps`.

    steps None, because the end is not known in advance (epochs): the rate stays where the rise ended.
    """

    kind: str
    warmup: int
    floor: float
    steps: int | None

    @classmethod
    def of(cls, training: TrainingConfig, steps: int | None) -> Schedule:
        return cls(training.schedule, training.warmup, training.min_learning_rate, steps)

    def share(self, step: int) -> float:
        """Of step 0, 1, 2, ...; the first step of a rise is not 0, which would be wasted."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant" or self.steps is None or self.steps <= self.warmup:
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * left
