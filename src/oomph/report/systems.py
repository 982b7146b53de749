"""The reference systems, and the claims of their reports beside the derived figures, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.report.terminal import strip_lines

_VERDICT_STYLE = {"right": "green", "wrong": "red", "in part": "yellow", "never measured": "dim"}


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


def systems_text(systems: Sequence[SystemLines], console: Console) -> str:
    parts: list[RenderableType] = []
    for system in systems:
        forms = Table.grid(padding=(0, 2, 0, 0))
        forms.add_column(no_wrap=True)
        forms.add_column(overflow="fold")
        forms.add_row(Text("naive", "red"), system.naive)
        forms.add_row(Text("model", "green"), system.model)
        parts += [_heading(system), Padding(forms, (0, 0, 0, 2))]
    parts.append(Text("\n`oomph systems NAME` checks the claims of its report."))
    return _captured(parts, console)


def claims_text(system: SystemLines, claims: Sequence[ClaimLine], console: Console) -> str:
    """Four columns; the claim and the report's figure share one."""
    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold", pad_edge=False)
    for title, ratio in (("claim", 3), ("derived", 3), ("verdict", None), ("why", 4)):
        table.add_column(title, overflow="fold", ratio=ratio, no_wrap=ratio is None)
    for one in claims:
        table.add_row(
            Text.assemble(one.claim, ":\n", (one.claimed, "italic")),
            one.derived,
            Text(one.verdict, _VERDICT_STYLE.get(one.verdict, "")),
            one.why,
        )
    return _captured([_heading(system), Padding(table, (1, 0, 0, 2))], console)


def _heading(system: SystemLines) -> Text:
    return Text.assemble((system.name, "bold cyan"), f": {system.title} (report {system.report})")


def _captured(parts: Sequence[RenderableType], console: Console) -> str:
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return strip_lines(capture.get().rstrip())
