"""A Diagnosis as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.records import Diagnosis, Finding, Peak
from oomph.report.as_json import prediction_to_json, site_to_json
from oomph.report.terminal import (
    called_from,
    columns,
    file_and_line,
    print_verdict,
    printable,
    section,
    share,
    source_code,
    strip_lines,
    without_folders,
)
from oomph.units import format_bytes

_ROWS = 9
_LEAST_SHARE = 0.005  # of the peak: smaller findings are left to the JSON


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The object of `oomph predict --json`, with its findings."""
    found = prediction_to_json(diagnosis.prediction)
    found["findings"] = [
        {**asdict(one), "sites": [site_to_json(site) for site in one.sites]} for one in diagnosis.findings
    ]
    found["notes"] += [{"text": note.text, "file": None, "line": None} for note in diagnosis.notes]
    return found


def cause_text(diagnosis: Diagnosis) -> str:
    """The cause and its first line of code, on one line."""
    if not diagnosis.findings:
        return ""
    cause = diagnosis.findings[0]
    at = f", at {file_and_line(cause.sites[0])}" if cause.sites else ""
    return f"cause: {cause.pattern}, {_size(cause, diagnosis.prediction.peak)}{at}\n"


def diagnosis_text(diagnosis: Diagnosis, console: Console) -> str:
    """The verdict, the cause with its lines, and a row for each further finding."""
    peak = diagnosis.prediction.peak
    total = peak.allocated  # as in the report of `oomph predict`
    with console.capture() as capture:
        print_verdict(diagnosis.prediction, console)
        if diagnosis.findings:
            cause, *others = diagnosis.findings
            section(console, f"Cause: {cause.pattern}, {_size(cause, peak)}", _cause(cause))
            shown = [one for one in others if one.bytes >= _LEAST_SHARE * total][:_ROWS]
            if shown:
                shown.sort(key=lambda one: -one.bytes)
                title = f"Also at the peak, as shares of the {format_bytes(total)} allocated"
                section(console, title, [_table(shown, peak, console.width)])
        for note in diagnosis.notes:
            console.print(Padding(Text(note.text, "dim"), (1, 0, 0, 0)))
    return strip_lines(capture.get())


def _size(one: Finding, peak: Peak) -> str:
    total, what = _whole(one, peak)
    return f"{format_bytes(one.bytes)} ({share(one.bytes, total)} of the {format_bytes(total)} {what})"


def _whole(one: Finding, peak: Peak) -> tuple[int, str]:
    """Fragmentation is reserved, and no part of what is allocated."""
    if one.pattern == "fragmentation":
        return peak.reserved, "reserved"
    return peak.allocated, "allocated"


def _cause(one: Finding) -> Sequence[Text]:
    lines = [Text(printable(f"{one.advice[0].upper()}{one.advice[1:]}.", 600))]
    lines += [Text(printable(text), "dim") for text in (one.formula, one.growth) if text]
    for site in one.sites:
        code = source_code(site) or printable(site.function)
        lines.append(Text.assemble((file_and_line(site), "bold"), "  ", code))
        if site.caller:
            lines.append(Text(called_from(site), "dim"))
    if one.fixes:
        lines.append(Text(f"Fixes: {', '.join(one.fixes)}"))
    return lines


def _table(findings: Sequence[Finding], peak: Peak, width: int) -> Table:
    table = columns("right size", "right share", "fold pattern", "fold growth", "fold line")
    for one in findings:
        line = without_folders(file_and_line(one.sites[0]), width // 3) if one.sites else ""
        total, what = _whole(one, peak)
        growth = one.growth if what == "allocated" else f"of the {format_bytes(total)} {what}"
        table.add_row(format_bytes(one.bytes), share(one.bytes, total), one.pattern, growth, line)
    return table
