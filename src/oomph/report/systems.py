"""The reference systems and the claims of their reports, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_VERDICT_STYLE = {"right": "green", "wrong": "red", "in part": "yellow", "never measured": "dim"}


class SystemLines(NamedTuple):
    """One system, one line for each form."""

    name: str
    report: str
    title: str
    naive: str
    model: str


class ClaimLine(NamedTuple):
    """A claim and what became of it, in words."""

    claim: str
    claimed: str
    derived: str
    verdict: str
    why: str


def systems_text(systems: Sequence[SystemLines], console: Console) -> str:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for system in systems:
        table.add_row(
            Text(system.name, "bold cyan"), Text.assemble(system.title, (f"  report {system.report}", "dim"))
        )
        table.add_row("", Text.assemble(("naive  ", "red"), system.naive))
        table.add_row("", Text.assemble(("model  ", "green"), system.model))
    hint = Text("\n`oomph systems NAME` checks the claims of its report.")
    return _captured([table, hint], console)


def claims_text(system: SystemLines, claims: Sequence[ClaimLine], console: Console) -> str:
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
    head = Text.assemble((system.name, "bold"), f": {system.title}, report {system.report}")
    return _captured([head, Padding(table, (1, 0, 0, 2))], console)


def _captured(parts: Sequence[RenderableType], console: Console) -> str:
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "".join(line.rstrip() + "\n" for line in capture.get().rstrip().splitlines())
