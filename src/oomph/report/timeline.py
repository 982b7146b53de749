"""Bars, and a chart of the allocated memory over the run, drawn with characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from oomph.records import Event, Moment, Prediction
from oomph.units import format_bytes

_ROWS = 8
_CURVE = "steel_blue"
# A limit far above the peak would flatten the curve; beyond this ratio it is not drawn.
_LIMIT_IN_VIEW = 1.6


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a chart."""

    levels: str  # fill of a cell from below, from just above empty to full, for charts
    eighths: str  # fill of a cell from the left, for bars
    limit: str
    peak: str
    axis: str
    tick: str
    corner: str
    side: str


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "▏▎▍▌▋▊▉█", "╌", "▼", "─", "┴", "└", "│")
ASCII = Glyphs("#", "#", "-", "v", "-", "+", "+", "|")


def bar(size: int, largest: int, width: int, glyphs: Glyphs) -> str:
    """A bar of `size` where `largest` fills `width`; anything above zero shows at least a sliver."""
    if size <= 0 or largest <= 0:
        return ""
    steps = len(glyphs.eighths)
    filled = max(1, round(size / largest * width * steps))
    whole, part = divmod(min(filled, width * steps), steps)
    return glyphs.eighths[-1] * whole + (glyphs.eighths[part - 1] if part else "")


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
    heights = column_heights(prediction.timeline, len(prediction.events), inner)
    # The row, counted from the top, that the limit runs through.
    limit_row = min(_ROWS - 1, max(0, _ROWS - 1 - int(limit / top * _ROWS))) if limit is not None else None

    lines = [_peak_marker(heights, peak, gutter, inner, glyphs)]
    for row, cells in enumerate(area_rows(heights, top, _ROWS, glyphs)):
        line = Text(no_wrap=True)
        line.append((limit_label if row == limit_row else "").rjust(gutter), "red")
        line.append(glyphs.side, "dim")
        _append_row(line, cells, row, limit_row, glyphs)
        lines.append(line)
    steps = _step_columns(prediction.events, inner)
    lines.append(_axis(steps, gutter, inner, glyphs))
    lines.append(_step_labels(prediction, steps, gutter, inner))
    return lines


def column_heights(timeline: Sequence[Moment], events: int, width: int) -> list[int]:
    """The most bytes allocated in each of `width` equal intervals of the run's events."""
    heights = [-1] * width
    last = [0] * width
    for moment in timeline:
        column = _column(moment.event, events, width)
        heights[column] = max(heights[column], moment.allocated)
        last[column] = moment.allocated
    level = 0  # an interval without a moment keeps the level at which the one before it ended
    for column in range(width):
        if heights[column] < 0:
            heights[column] = last[column] = level
        level = last[column]
    return heights


def area_rows(heights: Sequence[int], top: int, rows: int, glyphs: Glyphs) -> list[str]:
    """An area chart, top row first; `top` bytes fill all rows."""
    steps = len(glyphs.levels)
    filled = [0 if top <= 0 or size <= 0 else max(1, round(size / top * rows * steps)) for size in heights]
    lines = []
    for row in range(rows - 1, -1, -1):
        cells = (min(max(level - row * steps, 0), steps) for level in filled)
        lines.append("".join(glyphs.levels[cell - 1] if cell else " " for cell in cells))
    return lines


def _column(event: int, events: int, width: int) -> int:
    return min(width - 1, event * width // max(events, 1))


def _step_columns(events: Sequence[Event], width: int) -> list[tuple[int, str]]:
    """Where each step begins: (column, "step 2")."""
    return [
        (_column(index, len(events), width), event.label)
        for index, event in enumerate(events)
        if event.action == "mark" and event.label.startswith("step ")
    ]


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
    """`step 2: 30.1 GiB` at the beginning of each step, shortened where there is no room."""
    peaks = {f"step {one.step}": format_bytes(one.allocated) for one in prediction.steps}
    text = ""
    for index, (column, label) in enumerate(steps):
        room = (steps[index + 1][0] if index + 1 < len(steps) else inner) - column - 1
        full = f"{label}: {peaks[label]}" if label in peaks else label
        chosen = next((one for one in (full, label, label.removeprefix("step ")) if len(one) <= room), "")
        text = text.ljust(column) + chosen
    return Text(" " * (gutter + 1) + text, "dim", no_wrap=True)
