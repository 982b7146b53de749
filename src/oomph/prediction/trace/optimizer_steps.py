"""Counts the optimizer steps of a function that trains by itself, and ends its trace when they repeat."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

ENOUGH = 3  # the optimizer's state appears in the first; from the second on, steps repeat
# Of one optimizer, while another has not made its own: a critic steps more often than its generator.
MOST = 24


class TracedEnough(BaseException):
    """Unwinds the program out of its loop. No Exception: a program that handles its own lets it pass."""


class StepEnd(NamedTuple):
    """Where an optimizer's step ended, in the trace's events and in its kernels."""

    event: int
    kernel: int


class OptimizerSteps:
    """Told by hooks of every optimizer that is made and of every step; speaks up only while `watching`."""

    def __init__(self) -> None:
        self.watching = False
        self.stopped_at: int | None = None  # the event before which the trace was ended
        self._numbers = WeakIdKeyDictionary()  # optimizer -> its place in `_ends`
        # Kept when an optimizer is gone, as those of the function are at its end.
        self._ends: list[list[StepEnd]] = []

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in self._numbers:
            self._numbers[optimizer] = len(self._ends)
            self._ends.append([])

    def begin(self, optimizer: torch.optim.Optimizer, event: int) -> None:
        """Raises TracedEnough if every optimizer has made its steps, at the beginning of one more.

        A program that catches even this goes on and meets it again at its next step; what it does after the
        first is not part of the trace.
        """
        if not self.watching:
            return
        self.made(optimizer)
        steps = len(self._ends[self._numbers[optimizer]])
        alive = [len(self._ends[number]) for number in self._numbers.values()]
        if steps >= MOST or min(alive) >= ENOUGH:
            self.stopped_at = event if self.stopped_at is None else self.stopped_at
            raise TracedEnough

    def end(self, optimizer: torch.optim.Optimizer, event: int, kernel: int) -> None:
        if self.watching and self.stopped_at is None:
            self.made(optimizer)
            self._ends[self._numbers[optimizer]].append(StepEnd(event, kernel))

    def ends(self) -> tuple[StepEnd, ...]:
        """The ends of the training's steps: those of the optimizer that steps least often of the busy ones.

        With one that steps several times between two steps of the other, the other tells the rounds; where
        all step alike, the last of a round does.
        """
        busy = [ends for ends in self._ends if len(ends) >= ENOUGH]
        if busy:
            ends = min(busy, key=lambda ends: (len(ends), -ends[-1].event))
        else:
            ends = max(self._ends, key=lambda ends: (len(ends), ends[-1:]), default=[])
        return tuple(ends)
