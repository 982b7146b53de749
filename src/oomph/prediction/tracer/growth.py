"""Programs whose memory grows with every call of a model, past any limit: their verdict is known long before
they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from oomph.records import Growth, Site

_MOST_ROUNDS = 16  # past the limit; micro-batches whose losses are summed before one backward pass are fewer
_TIMES_LIMIT = 4  # or, past this,
_FEWEST_ROUNDS = 3  # that leave about as much behind as each other
_ABOUT = 2  # times as much, or half


@dataclass(slots=True)
class _Round:
    """Calls of one model from one line, of which each left about as much memory behind."""

    live_bytes: int  # before the last call
    rounds: int = 0
    grown: int = 0  # in all of them, but for the first, which also holds what is made once


class GrowthWatch:
    """Compares the memory before each call of a model with that before the last one from the same line."""

    def __init__(self, line: Callable[[], Site | None]) -> None:
        self.limit = sys.maxsize
        self.on_runaway: Callable[[str], object] | None = None  # ends the program, with the reason
        self.found: Growth | None = None
        self._line = line
        self._rounds: dict[tuple[int, Site | None], _Round] = {}

    def before_call(self, model: int, live_bytes: int) -> None:
        """`model`: its id."""
        if self.on_runaway is None:
            return
        site = self._line()
        site = site and (site.caller or site)
        last = self._rounds.setdefault((model, site), _Round(live_bytes))
        grown, last.live_bytes = live_bytes - last.live_bytes, live_bytes
        usual = last.grown // max(1, last.rounds - 1) if last.rounds else grown
        if grown <= 0 or not usual <= _ABOUT * grown <= _ABOUT**2 * usual:
            last.rounds = last.grown = 0
            return
        last.grown = grown + (last.grown if last.rounds > 1 else 0)
        last.rounds += 1
        rounds = _FEWEST_ROUNDS if live_bytes > _TIMES_LIMIT * self.limit else _MOST_ROUNDS
        is_most = _ABOUT * last.grown >= live_bytes  # else something other than the growth needs the memory
        if live_bytes > self.limit and is_most and last.rounds >= rounds:
            self.found = Growth(last.grown // (last.rounds - 1), site, calls=last.rounds)
            self.on_runaway(f"because {last.rounds} calls of its model left memory behind, past the limit")
