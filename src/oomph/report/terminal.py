"""A Prediction for people: a verdict, bars, the largest tensors, the lines to blame, a timeline, notes.

On a terminal it is drawn with colour and block characters; anywhere else it is plain ASCII of a fixed
width, so that it reads the same in a file, a pipe or a CI log.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import IO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.records import Prediction, Site, Stage
from oomph.report.chart import ASCII, UNICODE, Glyphs, bar
from oomph.report.grouping import Group, group_alike
from oomph.report.paths import place
from oomph.report.timeline import timeline_lines
from oomph.report.verdict import Verdict, verdict
from oomph.units import format_bytes

PLAIN_WIDTH = 100
_WIDEST = 120  # a full-screen terminal would tear the columns apart
_TENSORS = 10
_LINES = 5
_INDENT = 2
_ROOM_FOR_COLUMNS = 80
_OPS_WIDTH = 28
_SIZE_WIDTH = len("1023.9 MiB")

_STAGE_STYLE: dict[Stage, str] = {
    "parameters": "steel_blue",
    "gradients": "medium_purple3",
    "optimizer state": "dark_cyan",
    "batch": "grey62",
    "forward activations": "dark_orange",
    "loss": "indian_red",
    "backward": "gold3",
    "optimizer step": "dark_sea_green4",
    "workspace": "grey50",
}
_OUTCOME_STYLE = {"fits": "bold green", "does not fit": "bold red", "needs": "bold"}


def report_console(file: IO[str] | None = None) -> Console:
    """The console a report goes to: as wide as the terminal up to a readable width, or plain."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    width = min(console.width, _WIDEST) if console.is_terminal else PLAIN_WIDTH
    console.width = width
    return console


def report_text(prediction: Prediction, console: Console) -> str:
    """The whole report, as `console` would show it. Text, so that the caller decides how it is written."""
    with console.capture() as capture:
        _render(prediction, console)
    # Columns are padded to the full width; in a file those blanks are only noise.
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def _render(prediction: Prediction, console: Console) -> None:
    glyphs = UNICODE if console.is_terminal and console.encoding.lower().startswith("utf") else ASCII
    width = console.width - _INDENT
    _print_verdict(verdict(prediction), console)
    _print_figures(prediction, console)
    if prediction.at_peak:
        _section(console, "By stage, at the peak", [_stages(prediction, width, glyphs)])
        _section(console, "Largest tensors at the peak", [_tensors(group_alike(prediction.at_peak), width)])
    if prediction.by_line():
        _section(console, "Source lines that own the most", [_source_lines(prediction, width)])
    chart = timeline_lines(prediction, width, glyphs)
    if chart:
        _section(console, "Allocated over the run", chart)
    if prediction.notes:
        _section(console, "Notes", [_notes(prediction)])


def _section(console: Console, title: str, body: Sequence[RenderableType]) -> None:
    console.print()
    console.print(Text(title, "bold"))
    for part in body:
        console.print(Padding(part, (0, 0, 0, _INDENT)))


def _print_verdict(line: Verdict, console: Console) -> None:
    # One line however narrow the console: it is what people copy and scripts look for.
    style = _OUTCOME_STYLE.get(line.outcome, "bold yellow")
    text = Text.assemble((line.outcome, style), line.rest, (line.growth, "bold yellow"))
    console.print(text, soft_wrap=True)
    if line.refusal:
        console.print(Text(line.refusal), soft_wrap=True)


def _print_figures(prediction: Prediction, console: Console) -> None:
    peak = prediction.peak
    figures = Text(style="dim")
    figures.append(f"tensors {format_bytes(peak.allocated)}, allocator {format_bytes(peak.reserved)}, ")
    figures.append(f"with CUDA context {format_bytes(peak.device)}")
    if prediction.seconds:
        figures.append(f"; traced in {prediction.seconds:.1f} s")
    console.print(figures, soft_wrap=True)


def _stages(prediction: Prediction, width: int, glyphs: Glyphs) -> Table:
    stages = prediction.by_stage()
    total = sum(size for _, size in stages)
    largest = max(size for _, size in stages)
    table = _grid()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    for stage, size in stages:
        style = _STAGE_STYLE[stage]
        drawn = Text(bar(size, largest, min(40, max(4, width - 42)), glyphs), style)
        table.add_row(stage, format_bytes(size), Text(_share(size, total), "dim"), drawn)
    return table


def _tensors(groups: list[Group], width: int) -> Table:
    """Two lines for each: what it is, and below it, from where."""
    shown, rest = groups[:_TENSORS], groups[_TENSORS:]
    room = width - _SIZE_WIDTH - 2
    kinds = [_kind(group) for group in shown]
    # One very long shape should not push every operator to the right; a narrow console has no columns at all.
    kind_width = min(max(map(len, kinds)), 36) if room >= _ROOM_FOR_COLUMNS else 0
    op_width = _OPS_WIDTH if room >= _ROOM_FOR_COLUMNS else 0
    table = _sizes_and_text()
    for group, kind in zip(shown, kinds, strict=True):
        what = Text(f"{kind:<{kind_width}}  {_ops(group.ops):<{op_width}}  ")
        what.append(group.stage, _STAGE_STYLE[group.stage])
        table.add_row(format_bytes(group.bytes), Text("\n").join([what, *_where(group, room)]))
    if rest:
        more = f"in {sum(group.count for group in rest)} more"
        table.add_row(format_bytes(sum(group.bytes for group in rest)), Text(more, "dim"))
    return table


def _where(group: Group, width: int) -> list[Text]:
    """Line and module, side by side where there is room."""
    site = _site(group.site) if group.site else Text()
    module = Text(f"in {group.module}" if group.module else "", "dim")
    if site and module and len(site) + 2 + len(module) <= width:
        return [Text.assemble(site, "  ", module)]
    return [text for text in (site, module) if text]


def _source_lines(prediction: Prediction, width: int) -> Table:
    table = _sizes_and_text()
    for site, size in prediction.by_line()[:_LINES]:
        head = Text(f"{_share(size, prediction.peak.allocated):>5}  ", "dim").append_text(_site(site))
        source = _cut(linecache.getline(site.file, site.line).strip(), width - _SIZE_WIDTH - 2 - 7)
        if source:
            head.append(f"\n       {source}")
        table.add_row(format_bytes(size), head)
    return table


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def _site(site: Site) -> Text:
    return Text.assemble((place(site), "cyan"), (f" {site.function}", "dim"))


def _notes(prediction: Prediction) -> Table:
    table = _grid()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for note in prediction.notes:
        text = Text(note.text)
        if note.site:
            text.append(f"  {place(note.site)}", "cyan")
        table.add_row("-", text)
    return table


def _sizes_and_text() -> Table:
    table = _grid()
    table.add_column(justify="right", no_wrap=True, min_width=_SIZE_WIDTH)
    table.add_column(overflow="fold")
    return table


def _grid() -> Table:
    return Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)


def _kind(group: Group) -> str:
    count = f"{group.count} x " if group.count > 1 else ""
    return f"{count}[{', '.join(map(str, group.shape))}] {group.dtype}"


def _ops(ops: tuple[str, ...]) -> str:
    """All operators of a group if they fit their column, otherwise the first and how many more."""
    names = [op.removeprefix("aten.") for op in ops]
    joined = ", ".join(names)
    return joined if len(names) == 1 or len(joined) <= _OPS_WIDTH else f"{names[0]}, +{len(names) - 1}"


def _share(size: int, total: int) -> str:
    share = size / total if total else 0.0
    return "<1 %" if 0 < share < 0.01 else f"{share:.0%}".replace("%", " %")
