"""The reference systems, and the claims of their reports beside our figures, in the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.report.terminal import columns, strip_lines
from oomph.units import format_bytes

_STYLES = {"right": "green", "wrong": "red", "in part": "yellow"}
_STYLES |= {"fits": "green", "does not fit": "red", "fails": "red"}


class SystemLines(NamedTuple):
    """A system, and one line for each of its forms."""

    name: str
    report: str
    title: str
    naive: str
    model: str


class ClaimLine(NamedTuple):
    """A claim of a report, and what it comes to."""

    claim: str
    claimed: str
    derived: str
    verdict: str
    why: str
    predicted: str
    measured: str


class FormLine(NamedTuple):
    """A form of a system at the shape and on the GPU of its report."""

    form: str
    command: str
    verdict: str
    needs: int | None  # bytes, with the CUDA context
    failure: str  # the allocation that is refused and its line, or the program's error


class ReportLines(NamedTuple):
    failed: str
    commands: tuple[tuple[str, str], ...]  # the report's, ours
    forms: tuple[FormLine, ...]


def systems_text(systems: Sequence[SystemLines], console: Console) -> str:
    parts: list[RenderableType] = []
    for system in systems:
        forms = columns("left", "fold")
        forms.add_row(Text("naive", "red"), system.naive)
        forms.add_row(Text("model", "green"), system.model)
        parts += [_heading(system), Padding(forms, (0, 0, 0, 2))]
    parts.append(Text("\n`oomph systems NAME` predicts what its report ran into and checks its claims."))
    return _captured(parts, console)


def report_text(
    system: SystemLines, report: ReportLines, claims: Sequence[ClaimLine], console: Console
) -> str:
    """What failed, the commands, the forms, and the claims with the report's figure beside ours."""
    commands = Table.grid(padding=(0, 2, 0, 0))
    for theirs, ours in report.commands:
        commands.add_row(Text("report", "dim"), Text(theirs, overflow="fold"))
        commands.add_row(Text("here", "green"), Text(ours, overflow="fold"))
    forms = Table.grid(padding=(0, 2, 0, 0))
    for form in report.forms:
        needs = "" if form.needs is None else f"needs {format_bytes(form.needs)}"
        forms.add_row(form.form, Text(form.verdict, _STYLES.get(form.verdict, "")), needs)
    failures = [
        Padding(Text(f"{form.form}: {form.failure}"), (0, 0, 0, 2)) for form in report.forms if form.failure
    ]
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold", pad_edge=False)
    for title, ratio in (("claim", 3), ("ours", 4), ("verdict", None), ("why", 3)):
        table.add_column(title, overflow="fold", ratio=ratio, no_wrap=ratio is None)
    for one in claims:
        table.add_row(
            Text.assemble(one.claim, ":\n", (one.claimed, "italic")),
            Text("\n").join(Text.assemble((f"{kinds}: ", "dim"), text) for kinds, text in _figures(one)),
            Text(one.verdict, _STYLES.get(one.verdict, "")),
            one.why,
        )
    failed = Text.assemble(("Out of memory: ", "red"), report.failed)
    parts: list[RenderableType] = [_heading(system), Padding(failed, (0, 0, 1, 2))]
    parts += [Text("The report's commands", "bold"), Padding(commands, (0, 0, 0, 2))]
    if report.forms:
        gpu = report.forms[0].command.rpartition(" ")[2]
        parts.append(Text(f"\nPredicted at the report's shape, --gpu {gpu}", "bold"))
        parts.append(Text("  naive: the report's program; model: the implementation of this package", "dim"))
        parts += [Padding(forms, (0, 0, 0, 2)), Text("Where it fails", "bold"), *failures]
    verdicts = Counter(one.verdict for one in claims)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    parts += [Text(f"\n{len(claims)} claims of the report: {counts}", "bold"), Padding(table, (0, 0, 0, 2))]
    return _captured(parts, console)


def _figures(claim: ClaimLine) -> list[tuple[str, str]]:
    """(kinds, figure): kinds with the same figure are named together, those without one are left out."""
    kinds: dict[str, list[str]] = {}
    for kind in ("derived", "predicted", "measured"):
        kinds.setdefault(getattr(claim, kind), []).append(kind)
    return [(", ".join(names), figure) for figure, names in kinds.items() if figure != "-"]


def _heading(system: SystemLines) -> Text:
    return Text.assemble((system.name, "bold cyan"), f": {system.title} (report {system.report})")


def _captured(parts: Sequence[RenderableType], console: Console) -> str:
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return strip_lines(capture.get().rstrip())
