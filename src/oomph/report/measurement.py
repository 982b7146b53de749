"""Predicted beside measured: text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from oomph.records import Measurement, OpDifference, Prediction
from oomph.report.terminal import columns, strip_lines
from oomph.units import format_bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    title: str  # "as it is", "with the plan"
    predicted: Prediction
    measured: Measurement | None  # None: it ran out of memory
    differences: tuple[OpDifference, ...] = ()  # those with the most bytes first
    failure: str = ""

    @property
    def rows(self) -> list[tuple[str, float | None, float | None]]:
        """(name, predicted, measured)"""
        predicted, measured = self.predicted, self.measured
        found: tuple[float | None, ...] = (None, None, None)
        if measured is not None:
            found = measured.peak.allocated, measured.peak.reserved, measured.seconds_per_step
        values = predicted.peak.allocated, predicted.peak.reserved, predicted.step_seconds
        return list(zip(("allocated", "reserved", "step time"), values, found, strict=True))


def measurement_text(comparisons: Sequence[Comparison], console: Console) -> str:
    with console.capture() as capture:
        table = columns("left", "right predicted", "right measured", "right difference")
        for one in comparisons:
            table.add_row(Text(one.title, style="bold"))
            for name, predicted, measured in one.rows:
                table.add_row(
                    f"  {name}", _shown(name, predicted), _shown(name, measured), _error(predicted, measured)
                )
        console.print(table)
        _, before, measured_before = comparisons[0].rows[-1]
        _, after, measured_after = comparisons[-1].rows[-1]
        if len(comparisons) > 1 and before and after and measured_before and measured_after:
            predicted, measured = after / before, measured_after / measured_before
            console.print(f"\nstep time: x{predicted:.3f} predicted, x{measured:.3f} measured")
        for one in comparisons:
            if one.failure:
                console.print(Text(f"{one.title}: {one.failure}"))
            if one.differences:
                console.print(Text(f"\n{one.title}, ops whose bytes differ (measured less predicted):"))
            for each in one.differences:
                sign = "-" if each.bytes < 0 else "+"
                size = format_bytes(abs(each.bytes))
                aspect = "while it runs" if each.aspect == "high" else each.aspect
                times = f", {each.times} times" if each.times > 1 else ""
                console.print(Text(f"  {sign}{size}  {each.op}, {aspect}{times}"))
    return strip_lines(capture.get())


def measurement_to_json(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "schema": 1,
        "runs": [
            {
                "title": one.title,
                "gpu": one.measured.gpu_title if one.measured is not None else one.predicted.gpu_title,
                "rows": [dict(zip(("what", "predicted", "measured"), row, strict=True)) for row in one.rows],
                "residuals": [asdict(each) for each in one.differences],
                "failure": one.failure,
            }
            for one in comparisons
        ],
    }


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if name == "step time" else format_bytes(int(value))


def _error(predicted: float | None, measured: float | None) -> str:
    """In percent of the measured value."""
    return f"{100 * (measured / predicted - 1):+.2f} %" if predicted and measured else "-"
