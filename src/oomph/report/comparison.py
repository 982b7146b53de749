"""Two predictions or recordings beside each other: what grew, and at which line."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oomph.records import STAGES, Alive, Allocation, Peak, Prediction, Site
from oomph.report.as_json import sizes_to_json
from oomph.report.terminal import columns, file_and_line, printable, section, strip_lines
from oomph.units import format_bytes

_PARTS = 3  # of a path: checkouts in different directories are the same program
_ROWS = 12
_File = tuple[str, ...]  # the last parts of its path


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
    old_name = _renamed_files(before, after)
    totals: dict[Any, list[int]] = {}
    largest: tuple[dict[Any, Alive], dict[Any, Alive]] = {}, {}
    for is_after, run in enumerate((before, after)):
        for alive in run.at_peak:
            key = _origin(alive.allocation, old_name if is_after else {})
            totals.setdefault(key, [0, 0])[is_after] += alive.bytes
            if key not in largest[is_after] or alive.bytes > largest[is_after][key].bytes:
                largest[is_after][key] = alive
    old_ones, new_ones = largest
    moved = {
        old_ones[key].allocation.site: new_ones[key].allocation.site for key in old_ones if key in new_ones
    }
    lines: dict[tuple[str, str], LineChange] = {}
    for key, (old, new) in totals.items():
        one = (new_ones if key in new_ones else old_ones)[key].allocation
        if key not in new_ones:  # an op that is gone from a line which still makes others
            one = one._replace(site=moved.get(one.site, one.site))
        change = _change(one, old, new)
        line = change.label, change.function
        if line in lines:
            change = replace(change, before=old + lines[line].before, after=new + lines[line].after)
        lines[line] = change
    return sorted((one for one in lines.values() if one.bytes), key=lambda one: -abs(one.bytes))


def _origin(one: Allocation, old_name: Mapping[_File, _File]) -> Any:
    if one.site is None:
        return one.stage, one.op
    file = _file(one.site)
    return old_name.get(file, file), one.site.function, one.op


def _file(site: Site) -> _File:
    return Path(site.file).parts[-_PARTS:]


def _renamed_files(before: Prediction, after: Prediction) -> dict[_File, _File]:
    """New file -> the old one with the most functions in common, of those that only one run has."""
    functions: list[dict[_File, set[str]]] = [{}, {}]
    for found, run in zip(functions, (before, after), strict=True):
        for site, _ in run.by_line():
            found.setdefault(_file(site), set()).add(site.function)
    old, new = functions
    gone = [file for file in old if file not in new]
    renamed: dict[_File, _File] = {}
    for file in (file for file in new if file not in old):
        nearest = max(gone, key=lambda each: len(old[each] & new[file]), default=None)
        if nearest is not None and old[nearest] & new[file]:
            renamed[file] = nearest
            gone.remove(nearest)
    return renamed


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
    table = columns("left", "right before", "right after", "right change")
    for name, before, after in rows:
        table.add_row(name, format_bytes(before), format_bytes(after), signed_bytes(after - before))
    return table


def _lines_table(lines: Sequence[LineChange]) -> Table:
    table = columns("right", "fold")
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
