"""Two predictions or recordings beside each other: what grew, and at which line."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oomph.records import STAGES, Allocation, Peak, Prediction
from oomph.report.as_json import sizes_to_json
from oomph.report.labels import file_and_line, printable
from oomph.report.terminal import section, strip_lines
from oomph.units import format_bytes

_PARTS = 3  # of a path: checkouts in different directories are the same program
_ROWS = 12


@dataclass(frozen=True, slots=True)
class LineChange:
    """A line that holds another number of bytes at the peak than before; without a line, an op of a stage."""

    label: str  # "loss.py:41"
    function: str
    code: str
    before: int
    after: int

    @property
    def bytes(self) -> int:
        return self.after - self.before


def line_changes(before: Prediction, after: Prediction) -> list[LineChange]:
    """Largest first. An edit moves lines: an op of a function counts as the same in both, at its new line."""
    totals: dict[Any, list[int]] = {}
    largest: dict[Any, tuple[bool, int, Allocation]] = {}
    for is_after, run in enumerate((before, after)):
        for size, one in run.at_peak:
            key = _origin(one)
            totals.setdefault(key, [0, 0])[is_after] += size
            shown = bool(is_after), size, one  # the line of the newer program
            if key not in largest or shown[:2] > largest[key][:2]:
                largest[key] = shown
    lines: dict[tuple[str, str], LineChange] = {}
    for key, (old, new) in totals.items():
        change = _change(largest[key][2], old, new)
        line = change.label, change.function
        if line in lines:
            change = replace(change, before=old + lines[line].before, after=new + lines[line].after)
        lines[line] = change
    return sorted((one for one in lines.values() if one.bytes), key=lambda one: -abs(one.bytes))


def _origin(one: Allocation) -> Any:
    if one.site is None:
        return one.stage, one.op
    return Path(one.site.file).parts[-_PARTS:], one.site.function, one.op


def _change(one: Allocation, before: int, after: int) -> LineChange:
    op = one.op.removeprefix("aten.")
    if one.site is None:
        return LineChange(f"{one.stage}: {op}", "", "", before, after)
    code = linecache.getline(one.site.file, one.site.line).strip() or op
    return LineChange(file_and_line(one.site), one.site.function, code, before, after)


def stage_changes(before: Prediction, after: Prediction) -> list[tuple[str, int, int]]:
    """(stage, bytes before, bytes after)"""
    old, new = dict(before.by_stage()), dict(after.by_stage())
    return [(stage, old.get(stage, 0), new.get(stage, 0)) for stage in STAGES if stage in old or stage in new]


def comparison_text(before: Prediction, after: Prediction, console: Console) -> str:
    old, new = before.peak, after.peak
    with console.capture() as capture:
        style = "bold red" if new.reserved > old.reserved else "bold green"
        console.print(Text.assemble((comparison_line(old, new), style)), soft_wrap=True)
        rows = [("allocated", old.allocated, new.allocated)]
        rows += [(f"  {name}", a, b) for name, a, b in stage_changes(before, after) if a != b]
        section(console, "At the peak", [_table(rows)])
        lines = line_changes(before, after)[:_ROWS]
        if lines:
            section(console, "Source lines that changed most", [_lines_table(lines)])
    return strip_lines(capture.get())


def comparison_line(before: Peak, after: Peak) -> str:
    """`reserves 24.8 GiB -> 26.1 GiB: 1.3 GiB more (+5.2 %)`

    Without the CUDA context, which is the GPU's and may differ between the two.
    """
    difference = after.reserved - before.reserved
    sizes = f"reserves {format_bytes(before.reserved)} -> {format_bytes(after.reserved)}"
    if not difference:
        return f"{sizes}: unchanged"
    word = "more" if difference > 0 else "less"
    percent = f" ({100 * difference / before.reserved:+.1f} %)" if before.reserved else ""
    return f"{sizes}: {format_bytes(abs(difference))} {word}{percent}"


def signed_bytes(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def _table(rows: Sequence[tuple[str, int, int]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("")
    for title in ("before", "after", "change"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, before, after in rows:
        table.add_row(name, format_bytes(before), format_bytes(after), signed_bytes(after - before))
    return table


def _lines_table(lines: Sequence[LineChange]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for one in lines:
        text = Text.assemble((printable(one.label), "cyan"), (f" {printable(one.function)}", "dim"))
        text.append(f"  {format_bytes(one.before)} -> {format_bytes(one.after)}")
        if one.code:
            text.append(f"\n  {printable(one.code, 90)}")
        table.add_row(signed_bytes(one.bytes), text)
    return table


def comparison_to_json(before: Prediction, after: Prediction) -> dict[str, Any]:
    return {
        "schema": 1,
        "before": sizes_to_json(before.peak),
        "after": sizes_to_json(after.peak),
        "stages": [{"stage": stage, "before": a, "after": b} for stage, a, b in stage_changes(before, after)],
        "lines": [
            {
                "line": one.label,
                "function": one.function,
                "code": one.code,
                "before": one.before,
                "after": one.after,
            }
            for one in line_changes(before, after)
        ],
    }
