"""How fast training goes."""

from __future__ import annotations

import time


class Pace:
    """Tokens a second since the last report, without what evaluating and saving took.

    Tokens count when their step is known to be done. Steps are read in twos and threes where the host runs
    ahead of the device; a report that no token has arrived for repeats the rate of the one before it.
    """

    def __init__(self) -> None:
        self._since, self._tokens, self._rate = time.perf_counter(), 0, 0.0

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def leave_out(self, seconds: float) -> None:
        self._since += seconds

    def lap(self) -> float:
        now = time.perf_counter()
        if self._tokens and now > self._since:
            self._rate = self._tokens / (now - self._since)
            self._since, self._tokens = now, 0
        return self._rate
