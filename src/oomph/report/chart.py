"""Bars and area charts out of characters; pure, so that what they show can be tested cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomph.records import Event, Moment


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters a chart is drawn with. `levels` goes from just above empty to a full cell."""

    levels: str  # growing upwards, for charts
    eighths: str  # growing rightwards, for bars
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


def columns(timeline: Sequence[Moment], events: int, width: int) -> list[int]:
    """The highest allocated bytes in each of `width` equal stretches of the run's events."""
    heights = [-1] * width
    last = [0] * width
    for moment in timeline:
        column = _column(moment.event, events, width)
        heights[column] = max(heights[column], moment.allocated)
        last[column] = moment.allocated
    level = 0  # a stretch without a moment stays where the one before it ended
    for column in range(width):
        if heights[column] < 0:
            heights[column] = last[column] = level
        level = last[column]
    return heights


def step_columns(events: Sequence[Event], width: int) -> list[tuple[int, str]]:
    """Where each step begins: (column, "step 2")."""
    return [
        (_column(index, len(events), width), event.label)
        for index, event in enumerate(events)
        if event.action == "mark" and event.label.startswith("step ")
    ]


def area(heights: Sequence[int], top: int, rows: int, glyphs: Glyphs) -> list[str]:
    """Rows of characters, top first; `top` bytes fill all rows."""
    steps = len(glyphs.levels)
    filled = [0 if top <= 0 or size <= 0 else max(1, round(size / top * rows * steps)) for size in heights]
    lines = []
    for row in range(rows - 1, -1, -1):
        cells = (min(max(level - row * steps, 0), steps) for level in filled)
        lines.append("".join(glyphs.levels[cell - 1] if cell else " " for cell in cells))
    return lines


def row_of(size: int, top: int, rows: int) -> int:
    """The row, counted from the top, that a line at `size` bytes runs through."""
    return min(rows - 1, max(0, rows - 1 - int(size / top * rows)))


def _column(event: int, events: int, width: int) -> int:
    return min(width - 1, event * width // max(events, 1))
