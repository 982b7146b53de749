"""A Prediction as a report: verdict, stages, largest tensors, source lines, timeline, notes.

On a terminal it is drawn with colour and block characters; elsewhere it is plain ASCII of a fixed width, so
that it reads the same in a file, a pipe or a CI log. Other reports share its labels: file names relative to
the project, ranges of modules, groups of tensors alike.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console, RenderableType
from rich.containers import Lines
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.errors import UserError, place
from oomph.records import (
    Alive,
    BatchTensor,
    Event,
    Growth,
    Moment,
    Note,
    Peak,
    Prediction,
    Site,
    Stage,
    named_shapes,
)
from oomph.units import counted, format_bytes, parse_bytes

PLAIN_WIDTH = 100
_MAX_WIDTH = 120  # on a full-screen terminal the columns would stand too far apart
_TENSORS = 10
_LINES = 5
_BATCH_TENSORS = 6
_INDENT = 2
_MIN_WIDTH_FOR_COLUMNS = 80
_OPS_WIDTH = 28
_SIZE_WIDTH = len("1023.9 MiB")

_STAGE_STYLE: dict[Stage, str] = {
    "parameters": "steel_blue",
    "gradients": "medium_purple3",
    "optimizer state": "dark_cyan",
    "weight averages": "sky_blue3",
    "batch": "grey62",
    "forward activations": "dark_orange",
    "loss": "indian_red",
    "backward": "gold3",
    "optimizer step": "dark_sea_green4",
    "workspace": "grey50",
    "evaluation": "orange3",
}
_OUTCOME_STYLE = {
    "fits": "bold green",
    "does not fit": "bold red",
    "ran out of memory": "bold red",
    "needs": "bold",
    "peaked at": "bold",
}

# ------------------------------------------------------------------------------------------- verdict

Outcome = Literal[
    "fits",
    "fits for now",
    "fits, but only by releasing cached memory",
    "too close to call",
    "does not fit",
    "needs",
    "peaked at",
    "ran out of memory",
]

# What the program does at the peak, as it reads after "peak in".
_ACTIVITY: dict[Stage, str] = {
    "parameters": "loading the model",
    "batch": "creating the batch",
    "forward activations": "forward",
    "loss": "the loss",
    "evaluation": "evaluation",
    "backward": "backward",
    "gradients": "backward",
    "optimizer state": "the optimizer step",
    "optimizer step": "the optimizer step",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first line of a report, in parts that are coloured differently; `out_of_memory` is the second line.

    All but `outcome` may be empty.
    """

    outcome: Outcome
    details: str
    out_of_memory: str = ""
    growth: str = ""

    @property
    def line(self) -> str:
        return f"{self.outcome}{self.details}{self.growth}"


def verdict(prediction: Prediction) -> Verdict:
    """The memory needed, compared with the GPU's memory or with the limit of the allocator."""
    found = _recorded(prediction) if prediction.recorded else _traced_steps(prediction)
    if prediction.ranks > 1:
        found = replace(found, details=f"{found.details}; on each of {prediction.ranks:,} ranks")
    if prediction.growth is None or (prediction.verdict == "does not fit" and not prediction.growth.calls):
        return found
    outcome: Outcome = "fits for now" if found.outcome == "fits" else found.outcome
    return replace(found, outcome=outcome, growth=_growth(prediction, prediction.growth))


def _traced_steps(prediction: Prediction) -> Verdict:
    peak = _peak_position(prediction.needed)
    margin = f", margin {format_bytes(prediction.margin)}" if prediction.margin else ""
    if prediction.verdict is None:
        return Verdict(
            "needs", f" {_more_than(prediction)}{format_bytes(prediction.needed.device)}{margin}{peak}"
        )
    needed, available, owner = _needed_and_available(prediction)
    need_text, available_text = distinct_sizes(needed, available)
    need_text += " reserved" if is_limited(prediction) else ""  # without the CUDA context
    there_is = f"{owner} {available_text}"
    if prediction.verdict == "too close to call":
        cached, refused = "", _out_of_memory(prediction)
        if needed > available + (prediction.margin if refused else 0):
            cached = ", which may be enough if cached memory is released"
        elif _depends_on_values(prediction):
            margin += ", and more with other values"
        details = f": needs {need_text}{margin}; {there_is}{cached}{peak}"
        return Verdict("too close to call", details, refused and f"if it fails: {refused}")
    if prediction.verdict == "does not fit":
        fragmented = "" if needed > available else ", but its free blocks are too small (fragmentation)"
        details = f": needs {_more_than(prediction)}{need_text}; {there_is}{fragmented}{peak}"
        return Verdict("does not fit", details, _out_of_memory(prediction))
    if needed > available:
        details = f": needs {need_text} without releasing it{margin}; {there_is}{peak}"
        return Verdict("fits, but only by releasing cached memory", details)
    spare = f" with {format_bytes(available - needed)} to spare{margin}"
    if needed + prediction.margin > available:
        spare += ", since cached memory can be released"
    return Verdict("fits", f"{spare}: needs {need_text}; {there_is}{peak}")


def _recorded(prediction: Prediction) -> Verdict:
    allocated, peak = format_bytes(prediction.peak.allocated), prediction.peak
    if prediction.refused is None:
        activity = f" in {_ACTIVITY[peak.stage]}" if peak.stage in _ACTIVITY else ""
        at = f", at {file_and_line(peak.site)}" if peak.site else ""
        return Verdict("peaked at", f" {allocated}{activity}{at}")
    return Verdict("ran out of memory", f" with {allocated} allocated", _out_of_memory(prediction))


def _more_than(prediction: Prediction) -> str:
    """Of a program that was stopped because its memory grows."""
    return "more than " if prediction.growth is not None and prediction.growth.calls else ""


def _depends_on_values(prediction: Prediction) -> bool:
    """Whether the limit lies between what the fewest and the most elements need, or the steps that need least
    and most."""
    interval, limit = prediction.interval, prediction.limit
    if interval is None or limit is None:
        return False
    if prediction.verdict == "fits":  # cached memory can be released, allocated memory cannot
        return interval.high.allocated > limit
    return interval.low.reserved <= limit < interval.high.reserved + prediction.margin


def _growth(prediction: Prediction, growth: Growth) -> str:
    """`; grows by 144 MiB per step: out of memory after about 150 steps`"""
    if growth.calls:
        at = f" at {file_and_line(growth.site)}" if growth.site else ""
        return f"; grows by {format_bytes(growth.bytes)} with every call of the model{at}"
    text = f"; grows by {format_bytes(growth.bytes)} per step"
    if prediction.limit is None or prediction.limit < prediction.needed.reserved:
        return text
    more = (prediction.limit - prediction.needed.reserved) // growth.bytes
    return f"{text}: out of memory after about {len(prediction.steps) + more:,} steps"


def distinct_sizes(one: int, other: int) -> tuple[str, str]:
    """Both sizes formatted, with as many decimals as it takes to see which is larger."""
    texts = format_bytes(one), format_bytes(other)
    if one == other or texts[0] != texts[1]:
        return texts
    for decimals in (2, 3, 4):
        texts = f"{one / 2**30:.{decimals}f} GiB", f"{other / 2**30:.{decimals}f} GiB"
        if texts[0] != texts[1]:
            return texts
    return f"{one:,} bytes", f"{other:,} bytes"


def _needed_and_available(prediction: Prediction) -> tuple[int, int, str]:
    """Bytes needed, bytes available, and the words before the latter."""
    if is_limited(prediction):
        assert prediction.limit is not None
        return prediction.needed.reserved, prediction.limit, "the limit is"
    assert prediction.capacity is not None
    return prediction.needed.device, prediction.capacity, f"the {gpu_name(prediction)} has"


def is_limited(prediction: Prediction) -> bool:
    """Whether `--max` was given: it decides whether the step fits, whatever the GPU, and it limits what the
    allocator reserves, without the CUDA context."""
    peak, capacity, limit = prediction.peak, prediction.capacity, prediction.limit
    return limit is not None and (capacity is None or limit != capacity - (peak.device - peak.reserved))


def gpu_name(prediction: Prediction) -> str:
    """A GPU that was given as a size has no name."""
    return "GPU" if prediction.gpu is None or is_size(prediction.gpu) else prediction.gpu_title


def is_size(gpu: str) -> bool:
    """Whether it is a size of memory instead of a name."""
    try:
        return parse_bytes(gpu) >= 0
    except UserError:
        return False


def _peak_position(peak: Peak) -> str:
    at = f", at {file_and_line(peak.site)}" if peak.site else ""
    activity = _ACTIVITY.get(peak.stage) if peak.stage else None
    if peak.step == 0:
        when = f"{activity}, before the first step" if activity else ""
        return f"; peak in {when}{at}" if when else (f"; peak{at}" if at else "")
    if peak.stage == "evaluation":
        return f"; peak in evaluation after step {peak.step - 1}{at}"
    return f"; peak in {activity} of step {peak.step}{at}" if activity else f"; peak in step {peak.step}{at}"


def _out_of_memory(prediction: Prediction) -> str:
    refused = prediction.refused
    if refused is None:
        return ""
    at = f"at {file_and_line(refused.site)}" if refused.site else f"in {printable(refused.op)}"
    step = f" in step {refused.step}" if refused.step else ""
    return f"out of memory {at}{step}: tried to allocate {format_bytes(refused.bytes)}"


# ------------------------------------------------------------------------------------------- report


def verdict_text(prediction: Prediction) -> str:
    """The verdict alone, in one or two lines."""
    found = verdict(prediction)
    return "".join(f"{line}\n" for line in (found.line, found.out_of_memory) if line)


def report_console(file: IO[str] | None = None) -> Console:
    """The console a report goes to: as wide as the terminal up to a readable width, or plain."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    console.width = min(console.width, _MAX_WIDTH) if console.is_terminal else PLAIN_WIDTH
    return console


def report_text(prediction: Prediction, console: Console) -> str:
    """The whole report, as `console` would show it."""
    glyphs = UNICODE if console.is_terminal and console.encoding.lower().startswith("utf") else ASCII
    width = console.width - _INDENT
    with console.capture() as capture:
        print_verdict(prediction, console)
        if prediction.at_peak:
            total = format_bytes(prediction.peak.allocated)
            title = f"By stage at the peak, as shares of the {total} allocated"
            section(console, title, [_stages(prediction, width, glyphs)])
            groups = group_tensors(prediction.at_peak)
            section(console, "Largest tensors at the peak", [_tensors(groups, width)])
        if prediction.by_line():
            section(console, "Source lines with the most memory at the peak", [_lines(prediction, width)])
        if chart := timeline_lines(prediction, width, glyphs):
            section(console, "Allocated memory over the run", chart)
        if prediction.notes:
            section(console, "Notes", [notes_table(prediction.notes)])
    return strip_lines(capture.get())


def strip_lines(text: str) -> str:
    """Without the blanks that pad columns to the full width."""
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def section(console: Console, title: str, body: Sequence[RenderableType]) -> None:
    console.print()
    console.print(Text(title, "bold"))
    for part in body:
        console.print(Padding(part, (0, 0, 0, _INDENT)))


def print_verdict(prediction: Prediction, console: Console) -> None:
    # One line however narrow the console: people copy it, and scripts look for it.
    line, peak = verdict(prediction), prediction.needed
    style = _OUTCOME_STYLE.get(line.outcome, "bold yellow")
    parts = Text.assemble((line.outcome, style), line.details, (line.growth, "bold yellow"))
    console.print(parts, soft_wrap=True)
    if line.out_of_memory:
        console.print(Text(line.out_of_memory), soft_wrap=True)
    for text in assumptions(prediction):
        console.print(Text(text, "bold yellow"), soft_wrap=True)
    figures = f"allocated {format_bytes(peak.allocated)}, reserved {format_bytes(peak.reserved)}"
    if peak.device != peak.reserved:  # unknown in a recording
        figures += f", with the CUDA context {format_bytes(peak.device)}"
    seconds = f"; traced in {prediction.seconds:.1f} s" if prediction.seconds else ""
    if prediction.compile_seconds:
        seconds += f", of which torch.compile took {prediction.compile_seconds:.1f} s"
    console.print(Text(figures + seconds, "dim"), soft_wrap=True)
    if prediction.without_search is not None:
        console.print(Text(_search_line(prediction), "dim"), soft_wrap=True)
    if prediction.batch:
        console.print(Text(f"batch: {_batch(prediction.batch)}", "dim"), soft_wrap=True)


def _search_line(prediction: Prediction) -> str:
    peak = prediction.peak
    return (
        f"while cuDNN searches for algorithms: allocated {format_bytes(peak.allocated)}, "
        f"reserved {format_bytes(peak.reserved)}; it takes only memory that is free"
    )


def _batch(tensors: Sequence[BatchTensor]) -> str:
    """`input_ids [8, 1024] int64, labels [8, 1024] int64`, the largest ones where there are many.

    Those that a program moved to the GPU have no names; their dimensions have those of `--sizes`.
    """
    shown = sorted(tensors, key=lambda one: -math.prod(one.shape))[:_BATCH_TENSORS]
    texts = [
        f"{printable(one.name)} {list(one.shape)} {one.dtype}" if one.name else f"{named} {one.dtype}"
        for one, named in zip(tensors, named_shapes(tensors), strict=True)
        if one in shown
    ]
    more = len(tensors) - len(shown)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def assumptions(prediction: Prediction) -> Iterator[str]:
    """What was guessed that the verdict depends on."""
    for note in prediction.assumptions:
        at = f" ({file_and_line(note.site)})" if note.site else ""
        yield f"assumed: {note.text}{at}"
    interval = prediction.interval
    if interval is not None:
        low, high = distinct_sizes(interval.low.device, interval.high.device)
        verdict = "; the verdict depends on them" if _depends_on_values(prediction) else ""
        yield f"{interval.reason}: from {low} to {high}{verdict}"


def _stages(prediction: Prediction, width: int, glyphs: Glyphs) -> Table:
    stages = prediction.by_stage()
    total = sum(size for _, size in stages)
    largest = max(size for _, size in stages)
    table = columns("left", "right", "right", "left")
    table.columns[-1].overflow = "crop"
    for stage, size in stages:
        drawn = bar(size, largest, min(40, max(4, width - 42)), glyphs)
        part = Text(share(size, total), "dim")
        table.add_row(stage, format_bytes(size), part, Text(drawn, _STAGE_STYLE[stage]))
    return table


def _tensors(groups: list[TensorGroup], width: int) -> Table:
    """Two lines for each: what it is, then the source line and the module."""
    shown, rest = groups[:_TENSORS], groups[_TENSORS:]
    available = width - _SIZE_WIDTH - 2
    kinds = [_kind(group) for group in shown]
    # One very long shape should not push every operator to the right; a narrow console has no columns at all.
    wide = available >= _MIN_WIDTH_FOR_COLUMNS
    kind_width = min(max(map(len, kinds)), 36) if wide else 0
    op_width = _OPS_WIDTH if wide else 0
    table = _sizes_and_text()
    for group, kind in zip(shown, kinds, strict=True):
        first = Text(f"{kind:<{kind_width}}  {_ops(group.ops):<{op_width}}  ")
        first.append(group.stage, _STAGE_STYLE[group.stage])
        table.add_row(format_bytes(group.bytes), Text("\n").join([first, *_origin(group, available)]))
    if rest:
        more = f"in {sum(group.count for group in rest)} more"
        table.add_row(format_bytes(sum(group.bytes for group in rest)), Text(more, "dim"))
    return table


def _origin(group: TensorGroup, width: int) -> list[Text]:
    """Source line and module, side by side where both fit."""
    site = _site(group.site) if group.site else Text()
    module = Text(f"in {group.module}" if group.module else "", "dim")
    if site and module and len(site) + 2 + len(module) <= width:
        return [Text.assemble(site, "  ", module)]
    return [text for text in (site, module) if text]


def _lines(prediction: Prediction, width: int) -> Table:
    table = _sizes_and_text()
    code_width = width - _SIZE_WIDTH - 2 - 7
    for site, size in prediction.by_line()[:_LINES]:
        text = Text(f"{share(size, prediction.peak.allocated):>5}  ", "dim").append_text(_site(site))
        for code, style in ((source_code(site), ""), (called_from(site), "dim")):
            if len(code) > code_width:
                code = code[: max(0, code_width - 3)] + "..."
            if code:
                text.append(f"\n       {code}", style)
        table.add_row(format_bytes(size), text)
    return table


def _site(site: Site) -> Text:
    return Text.assemble((file_and_line(site), "cyan"), (f" {printable(site.function)}", "dim"))


def notes_table(notes: Iterable[Note]) -> Table:
    table = columns("left", "fold")
    for note in notes:
        text = Text(printable(note.text, 2000))
        if note.site:
            text.append(f"  {file_and_line(note.site)}", "cyan")
        table.add_row("-", text)
    return table


def columns(*kinds: str) -> Table:
    """A table without lines. Each column is "right", "left" (both never wrapped) or "fold", and has a heading
    where one follows: "right saves"."""
    table = _Columns(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.show_header = any(" " in each for each in kinds)
    for kind, _, heading in (each.partition(" ") for each in kinds):
        if kind == "fold":
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right" if kind == "right" else "left", no_wrap=True)
    return table


class _Columns(Table):
    def add_row(self, *cells: Any, **options: Any) -> None:
        kinds = (column.overflow for column in self.columns)
        texts = (
            _Folded().append(cell) if kind == "fold" else cell
            for cell, kind in zip(cells, kinds, strict=False)  # a row may be shorter
        )
        super().add_row(*texts, **options)


class _Folded(Text):
    """Text whose words break after a mark if they are longer than a line: `micro_batches:`, `parts=4`."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        return Text("\n").join(self.divide(_breaks(self.plain, width))).wrap(console, width, **options)


def _breaks(text: str, width: int) -> Iterator[int]:
    for word in re.finditer(r"\S+", text):
        start = word.start()
        while word.end() - start > width:
            line = text[start : start + width]
            start += max(map(line.rfind, ":,")) + 1 or max(map(line.rfind, "=_./-")) + 1 or width
            yield start


def _sizes_and_text() -> Table:
    table = columns("right", "fold")
    table.columns[0].min_width = _SIZE_WIDTH
    return table


def _kind(group: TensorGroup) -> str:
    if not group.dtype:  # of a recording, which has sizes only
        return counted(group.count, "tensor")
    count = f"{group.count} x " if group.count > 1 else ""
    return f"{count}[{', '.join(map(str, group.shape))}] {group.dtype}"


def _ops(ops: tuple[str, ...]) -> str:
    """All operators of a group if they fit their column, otherwise the first and how many more."""
    names = [op.removeprefix("aten.") for op in ops]
    joined = ", ".join(names)
    return joined if len(names) == 1 or len(joined) <= _OPS_WIDTH else f"{names[0]}, +{len(names) - 1}"


def share(size: int, total: int) -> str:
    share = size / total if total else 0.0
    return "<1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")


# -------------------------------------------------------------------------------------- bars and the timeline

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


# ----------------------------------------------------------------------------------------------------- labels

_INSTALLED = ("site-packages", "dist-packages")


def printable(text: str, most: int = 300) -> str:
    """`text` on one line of at most `most` characters, with control characters as escapes."""
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}...{text[-most // 4 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def short_path(file: str, base: Path | None = None) -> str:
    """`file` relative to `base` (default: the current directory) when below it, otherwise its last parts."""
    if file.startswith("<"):  # "<stdin>", "<string>": not a file at all
        return file
    path = Path(file)
    # An environment often lives below the current directory, so this comes first.
    for marker in _INSTALLED:
        if marker in path.parts:
            last = len(path.parts) - 1 - path.parts[::-1].index(marker)
            return Path(*path.parts[last + 1 :]).as_posix()
    if not path.is_absolute():
        return path.as_posix()
    base = base or Path.cwd()
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    if len(path.parts) <= 4:
        return path.as_posix()
    return ".../" + Path(*path.parts[-3:]).as_posix()


def file_and_line(site: Site) -> str:
    """`loss.py:41`"""
    return place(printable(short_path(site.file)), site.line)


def without_folders(path: str, width: int) -> str:
    """`.../loss/loss_utils.py:40`: without as many of its first folders as it takes to be that short."""
    parts = path.split("/")
    shorter = [path, *("/".join(["...", *parts[first:]]) for first in range(1, len(parts)))]
    return next((each for each in shorter if len(each) <= width), shorter[-1])


def source_code(site: Site) -> str:
    """The line itself; "" where its file cannot be read."""
    return printable(linecache.getline(site.file, site.line).strip())


def called_from(site: Site) -> str:
    """`called from train.py:31  trainer.train()`; "" for a line of the user's own."""
    caller = site.caller
    return f"called from {file_and_line(caller)}  {source_code(caller)}".rstrip() if caller else ""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one source line, shape, dtype and stage: one row of a report. Its strings are printable."""

    bytes: int  # of all of them together
    count: int
    shape: tuple[int, ...]
    dtype: str
    ops: tuple[str, ...]  # each once, in order of first appearance
    module: str  # "transformer.h.{0..11}.attn"
    site: Site | None
    stage: Stage


def group_tensors(at_peak: Iterable[Alive]) -> list[TensorGroup]:
    """One group per (line, shape, dtype, stage), largest first.

    Tensors without a line are grouped only if their modules differ in nothing but layer numbers: two matrices
    of the same shape in unrelated modules stay apart.
    """
    members: dict[tuple[object, ...], list[Alive]] = {}
    for alive in at_peak:
        one = alive.allocation
        where = (one.site.file, one.site.line) if one.site else (without_numbers(one.module), one.op)
        members.setdefault((where, one.shape, one.dtype, one.stage), []).append(alive)
    groups = [_group(alike) for alike in members.values()]
    return sorted(groups, key=lambda group: -group.bytes)  # stable: ties keep their order


def collapse_modules(paths: Iterable[str]) -> str:
    """Many module paths as one: `h.{0..11}.attn`; never names a module that is not among `paths`."""
    distinct = list(dict.fromkeys(path for path in paths if path))
    if not distinct:
        return ""
    stacks: dict[str, list[str]] = {}
    for path in distinct:
        stacks.setdefault(without_numbers(path), []).append(path)
    collapsed = [_collapse_numbers(stack) for stack in stacks.values()]
    whole = _collapse_names(collapsed)
    if whole is not None:
        return whole
    more = len(distinct) - len(next(iter(stacks.values())))
    return f"{collapsed[0]} and {more} more"


def _group(alike: list[Alive]) -> TensorGroup:
    first = alike[0].allocation
    return TensorGroup(
        bytes=sum(alive.bytes for alive in alike),
        count=len(alike),
        shape=first.shape,
        dtype=printable(first.dtype),
        ops=tuple(map(printable, dict.fromkeys(alive.allocation.op for alive in alike))),
        module=printable(collapse_modules(alive.allocation.module for alive in alike)),
        site=first.site,
        stage=first.stage,
    )


def without_numbers(module: str) -> str:
    """Two layers of one stack give the same result."""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


def _collapse_numbers(paths: list[str]) -> str:
    """Paths of one stack; a varying number becomes `{0..11}`, or `*` where a range would claim too much."""
    columns = _distinct_parts([path.split(".") for path in paths])
    every_combination = math.prod(map(len, columns)) == len(paths)
    return ".".join(
        column[0] if len(column) == 1 else (_range(column) if every_combination else "*")
        for column in columns
    )


def _collapse_names(paths: list[str]) -> str | None:
    """Paths that differ in one name become `attn.{q_proj,k_proj}`; None when they differ in more."""
    if len(paths) == 1:
        return paths[0]
    # Split at the dots, but not at those inside `{0..11}`.
    parts = [re.findall(r"(?:\{[^}]*\}|[^.{])+", path) for path in paths]
    if len({len(one) for one in parts}) != 1 or len(paths) > 4:
        return None
    columns = _distinct_parts(parts)
    varying = [column for column in columns if len(column) > 1]
    if len(varying) != 1 or any("{" in name or name == "*" for name in varying[0]):
        return None
    return ".".join(column[0] if len(column) == 1 else "{" + ",".join(column) + "}" for column in columns)


def _distinct_parts(paths: list[list[str]]) -> list[list[str]]:
    """For each position in paths of one length, the parts that occur there, each once."""
    return [list(dict.fromkeys(parts)) for parts in zip(*paths, strict=True)]


def _range(parts: list[str]) -> str:
    values = sorted(map(int, parts))
    if len(values) > 2 and values[-1] - values[0] == len(values) - 1:
        return f"{{{values[0]}..{values[-1]}}}"
    if len(values) <= 4:
        return "{" + ",".join(map(str, values)) + "}"
    return f"{{{len(values)} of {values[0]}..{values[-1]}}}"
