"""Two predictions or recordings beside each other: what grew, and at which line."""

from __future__ import annotations

import linecache
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oomph.records import STAGES, Allocation, Peak, Prediction, Site
from oomph.report.as_json import sizes_to_json
from oomph.report.terminal import columns, file_and_line, printable, section, strip_lines
from oomph.units import format_bytes

_PARTS = 3  # of a path: checkouts in different directories are the same program
_ROWS = 12
_File = tuple[str, ...]  # the last parts of its path
_Function = tuple[_File, str]
_Lines = dict[_Function, dict[int, set[str]]]  # ops of each line


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
    """Largest first. An edit moves lines: those of a function are compared in order, by the ops they call."""
    old_name = _renamed_files(before, after)
    was = _old_lines(_ops_by_line(before, {}), _ops_by_line(after, old_name))
    totals: dict[Any, list[int]] = {}
    shown: dict[Any, Allocation] = {}
    for is_after, run in enumerate((before, after)):
        for alive in run.at_peak:
            one = alive.allocation
            key: Any = (one.stage, one.op)
            if one.site is not None:
                key = _function(one.site, old_name if is_after else {}), one.site.line
                key = was.get(key, ("new", key)) if is_after else key
            totals.setdefault(key, [0, 0])[is_after] += alive.bytes
            if key not in shown or (is_after and totals[key][1] == alive.bytes):  # the first of the new ones
                shown[key] = one
    changes = [_change(shown[key], old, new) for key, (old, new) in totals.items() if old != new]
    return sorted(changes, key=lambda one: -abs(one.bytes))


def _function(site: Site, old_name: Mapping[_File, _File]) -> _Function:
    file = _file(site)
    return old_name.get(file, file), site.function


def _ops_by_line(run: Prediction, old_name: Mapping[_File, _File]) -> _Lines:
    found: _Lines = {}
    for alive in run.at_peak:
        site, op = alive.allocation.site, alive.allocation.op
        if site is not None:
            found.setdefault(_function(site, old_name), {}).setdefault(site.line, set()).add(op)
    return found


def _old_lines(before: _Lines, after: _Lines) -> dict[tuple[_Function, int], tuple[_Function, int]]:
    """The line before, of each line that was there."""
    found = {}
    for function in before.keys() & after.keys():
        old, new = before[function], after[function]
        pairs = [(line, line) for line in old.keys() & new.keys()]
        if len(pairs) < min(len(old), len(new)):  # it was edited
            lines = sorted(old), sorted(new)
            ops = [frozenset(old[line]) for line in lines[0]], [frozenset(new[line]) for line in lines[1]]
            pairs = []
            for what, i, j, k, m in SequenceMatcher(None, *ops, autojunk=False).get_opcodes():
                if what in ("equal", "replace"):
                    pairs += zip(lines[0][i:j], lines[1][k:m], strict=False)
        found.update({(function, now): (function, was) for was, now in pairs})
    return found


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
            {"line": fields.pop("label"), **fields} for fields in map(asdict, line_changes(before, after))
        ],
    }
