"""The reference systems and the claims of their reports, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_VERDICT_STYLE = {"right": "green", "wrong": "red", "in part": "yellow", "never measured": "dim"}


class CaseLines(NamedTuple):
    """One system, one line for each form."""

    name: str
    report: str
    title: str
    sick: str
    healthy: str


class ClaimLine(NamedTuple):
    """A claim and what became of it, in words."""

    claim: str
    claimed: str
    derived: str
    verdict: str
    why: str


def cases_text(cases: Sequence[CaseLines], console: Console) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for case in cases:
        table.add_row(
            Text(case.name, "bold cyan"), Text.assemble(case.title, (f"  report {case.report}", "dim"))
        )
        table.add_row("", Text.assemble(("sick     ", "red"), case.sick))
        table.add_row("", Text.assemble(("healthy  ", "green"), case.healthy))
    hint = Text("\n`oomph cases NAME` checks the claims of its report.")
    return _captured([table, hint], console)


def claims_text(case: CaseLines, claims: Sequence[ClaimLine], console: Console) -> str:
    """Four columns; a figure and the report's own stand in one, so that they can be compared."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 1, 0), header_style="bold", pad_edge=False)
    for title, share in (("claim", 3), ("derived", 3), ("verdict", None), ("why", 4)):
        table.add_column(title, overflow="fold", ratio=share, no_wrap=share is None)
    for one in claims:
        table.add_row(
            Text.assemble(one.claim, ":\n", (one.claimed, "italic")),
            one.derived,
            Text(one.verdict, _VERDICT_STYLE.get(one.verdict, "")),
            one.why,
        )
    head = Text.assemble((case.name, "bold"), f": {case.title}, report {case.report}")
    return _captured([head, Padding(table, (1, 0, 0, 2))], console)


def _captured(parts: Sequence[RenderableType], console: Console) -> str:
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "".join(line.rstrip() + "\n" for line in capture.get().rstrip().splitlines())
