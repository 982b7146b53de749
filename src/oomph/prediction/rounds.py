"""Accumulated batches that do what the one before them did need not be traced: they are counted."""

from __future__ import annotations

from oomph.prediction.trace.tracer import Tracer
from oomph.records import Event


class Rounds:
    """One step's batches, one after the other, each in one or more passes."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._did: list[tuple[str, str, int, int]] = []
        self._live = -1
        self._ids, self._events, self._kernels = self._now()

    def repeats(self) -> bool:
        """A round ends: whether it did on the GPU just what the one before it did, and left nothing more.

        The first of a step makes the gradients; the second finds the loss of the first alive, and so does
        every later one. A model that differs from round to round, or keeps something of each, is traced to
        its end.
        """
        ids, events, kernels = self._now()
        did = [self._done(event) for event in self._tracer.ledger.events[self._events :]]
        live = self._tracer.ledger.live_bytes
        alike = did == self._did and live == self._live
        self._live = live
        self._did, self._ids, self._events = did, ids, events
        self._last, self._kernels = self._kernels, kernels
        return alike

    def count_again(self, times: int) -> None:
        """So many more like the last one: their time, and no memory."""
        if times:
            told = "the first few of a step's accumulated batches are traced: the others do the same"
            self._tracer.ledger.note(told)
        self._tracer.work.kernels += self._tracer.work.kernels[self._last :] * times

    def _done(self, event: Event) -> tuple[str, str, int, int]:
        """The same for the same event of another round: allocations by their number in it."""
        if event.action == "mark":
            return event.action, event.label, 0, 0
        return event.action, event.label, event.id - self._ids, self._tracer.ledger.drafts[event.id].bytes

    def _now(self) -> tuple[int, int, int]:
        ledger = self._tracer.ledger
        return len(ledger.drafts), len(ledger.events), len(self._tracer.work.kernels)
