"""The small timeline of a report: allocated bytes over the run, the peak marked, the limit drawn in."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from oomph.records import Prediction
from oomph.report.chart import Glyphs, area, columns, row_of, step_columns
from oomph.units import format_bytes

_ROWS = 8
_CURVE = "steel_blue"
# A limit far above the peak would flatten the curve; beyond this ratio it is told rather than drawn.
_LIMIT_IN_VIEW = 1.6


def timeline_lines(prediction: Prediction, width: int, glyphs: Glyphs) -> list[Text]:
    """The chart, line by line, `width` characters wide; empty when there is nothing to draw."""
    peak = prediction.peak.allocated
    if not prediction.timeline or peak <= 0:
        return []
    limit = prediction.limit
    if limit is not None and limit > peak * _LIMIT_IN_VIEW:
        limit = None
    top = max(peak, limit or 0)
    limit_label = f"limit {format_bytes(limit)} " if limit is not None else ""
    gutter = max(len(limit_label), len("0 "))
    inner = width - gutter - 1
    heights = columns(prediction.timeline, len(prediction.events), inner)
    limit_row = row_of(limit, top, _ROWS) if limit is not None else None

    lines = [_peak_marker(heights, peak, gutter, inner, glyphs)]
    for row, cells in enumerate(area(heights, top, _ROWS, glyphs)):
        line = Text(no_wrap=True)
        line.append((limit_label if row == limit_row else "").rjust(gutter), "red")
        line.append(glyphs.side, "dim")
        _append_row(line, cells, row, limit_row, glyphs)
        lines.append(line)
    steps = step_columns(prediction.events, inner)
    lines.append(_axis(steps, gutter, inner, glyphs))
    lines.append(_step_labels(prediction, steps, gutter, inner))
    return lines


def _append_row(line: Text, cells: str, row: int, limit_row: int | None, glyphs: Glyphs) -> None:
    if row != limit_row:
        above = limit_row is not None and row < limit_row
        line.append(cells.rstrip(), "red" if above else _CURVE)
        return
    for blank, run in groupby(cells, key=lambda cell: cell == " "):
        drawn = "".join(run)
        line.append(glyphs.limit * len(drawn) if blank else drawn, "red dim" if blank else _CURVE)


def _peak_marker(heights: list[int], peak: int, gutter: int, inner: int, glyphs: Glyphs) -> Text:
    column = heights.index(max(heights))
    label = f"peak {format_bytes(peak)}"
    if column + 2 + len(label) <= inner:
        text = " " * column + f"{glyphs.peak} {label}"
    else:
        text = f"{label} {glyphs.peak}".rjust(column + 1)
    return Text(" " * (gutter + 1) + text, "bold", no_wrap=True)


def _axis(steps: list[tuple[int, str]], gutter: int, inner: int, glyphs: Glyphs) -> Text:
    cells = [glyphs.axis] * inner
    for column, _ in steps:
        cells[column] = glyphs.tick
    return Text("0 ".rjust(gutter) + glyphs.corner + "".join(cells), "dim", no_wrap=True)


def _step_labels(prediction: Prediction, steps: list[tuple[int, str]], gutter: int, inner: int) -> Text:
    """`step 2: 30.1 GiB` under each step's beginning, or as much of it as there is room for."""
    peaks = {f"step {one.step}": format_bytes(one.allocated) for one in prediction.steps}
    text = ""
    for index, (column, label) in enumerate(steps):
        room = (steps[index + 1][0] if index + 1 < len(steps) else inner) - column - 1
        full = f"{label}: {peaks[label]}" if label in peaks else label
        chosen = next((one for one in (full, label, label.removeprefix("step ")) if len(one) <= room), "")
        text = text.ljust(column) + chosen
    return Text(" " * (gutter + 1) + text, "dim", no_wrap=True)
