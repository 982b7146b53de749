"""One bar, and how it is read off rows. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from op_rows import Row

# Two medians of one run differ by so much without a reason: "never slower" allows it.
NOISE = 1.03


@dataclass(frozen=True)
class Bar:
    """One demand: what it is about, what was measured, and the most that it may be."""

    about: str
    measured: float | None  # None: a row that it needs is missing or failed
    at_most: float
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.at_most

    def line(self) -> str:
        verdict = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        measured, bar = self._show(self.measured), self._show(self.at_most)
        return f"{verdict:12s} {measured:>12s}  (bar {bar})  {self.about}"

    def _show(self, value: float | None) -> str:
        if value is None:
            return "-"
        return {"x": f"{value:.3f} x", "MiB": f"{value:,.0f} MiB", "%": f"{value:.2f} %"}.get(
            self.unit, f"{value:.0f}{self.unit}"
        )


def on_gpu(rows: Sequence[Row], op: str) -> dict[str, dict[str, Row]]:
    """Rows of one op by shape and contender, without those of a CPU."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row.op == op and not row.gpu.startswith("cpu"):
            found.setdefault(row.shape, {})[row.contender] = row
    return found


def over(row: Row | None, other: Row | None, value: str = "median_ms") -> float | None:
    above, below = getattr(row, value, None), getattr(other, value, None)
    return above / below if above is not None and below else None
