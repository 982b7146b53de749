"""Fixes for people and for programs: what each changes, saves and costs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.records import FixKind, Prediction, Proposal
from oomph.units import format_bytes

_LONGEST_LIST = 30


def proposals_to_json(prediction: Prediction, proposals: Sequence[Proposal]) -> dict[str, Any]:
    return {
        "schema": 1,
        "gpu": prediction.gpu,
        "peak": {"allocated": prediction.peak.allocated, "reserved": prediction.peak.reserved},
        "fixes": [
            {
                "fix": one.fix,
                "options": dict(one.options),
                "kind": one.kind,
                "changes": one.changes,
                "where": list(one.where),
                "saving": one.saving,
                "slowdown": one.slowdown,
                "peak": None
                if one.peak is None
                else {"allocated": one.peak.allocated, "reserved": one.peak.reserved},
                "note": one.note,
            }
            for one in proposals
        ],
    }


def proposals_text(
    prediction: Prediction, proposals: Sequence[Proposal], kinds: Iterable[FixKind], console: Console
) -> str:
    with console.capture() as capture:
        head = f"Peak {format_bytes(prediction.peak.reserved)} on {prediction.gpu_title}. "
        if not proposals:
            console.print(f"{head}No fix of the kinds {', '.join(kinds)} lowers it.")
        else:
            console.print(f"{head}Each fix by itself, predicted:")
            console.print(Padding(_table(proposals), (1, 0, 1, 2)))
            for kind, sentences in _sentences(proposals).items():
                console.print(Text(f"  {kind}", style="bold"))
                for name, sentence in sentences.items():
                    console.print(Padding(Text(f"{name}: {sentence}"), (0, 0, 0, 4)))
            notes = {(one.fix, one.note): None for one in proposals if one.note}
            if notes:
                console.print(Text("  to know before", style="bold"))
            for name, note in notes:
                console.print(Padding(Text(f"{name}: {note}"), (0, 0, 0, 4)))
        missing = [kind for kind in ("precision", "training") if kind not in kinds]
        if missing:
            console.print(f"\nNot shown: fixes that change the numbers (--allow {','.join(missing)}).")
    return _trimmed(capture.get())


def catalogue_text(rows: Sequence[tuple[str, str, str]], console: Console) -> str:
    table = Table.grid(padding=(0, 2))
    for name, kind, changes in rows:
        table.add_row(Text(name, style="bold"), kind, changes)
    with console.capture() as capture:
        console.print(table)
        console.print(
            "\n`oomph fixes TARGET` tells which apply to a workload, and what each saves and costs."
        )
    return _trimmed(capture.get())


def _table(proposals: Sequence[Proposal]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for title, justify in (("fix", "left"), ("saves", "right"), ("peak", "right"), ("time", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("where")
    for one in proposals:
        table.add_row(
            _with_options(one.fix, one.options),
            "?" if one.saving is None else format_bytes(one.saving),
            "?" if one.peak is None else format_bytes(one.peak.reserved),
            "?" if one.slowdown is None else f"x{one.slowdown:.2f}",
            _where(one),
        )
    return table


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    """As it can be typed back, unless a list is too long for a column: then the JSON has it."""
    shown = [f"{key}={_plain(value)}" for key, value in options.items()]
    return name + (":" + ",".join(shown) if shown else "")


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_LIST else f"[{len(value)} names]"


def _where(one: Proposal) -> str:
    if len(one.where) <= 2:
        return ", ".join(one.where)
    return f"{one.where[0]} .. {one.where[-1]} ({len(one.where)})"


def _sentences(proposals: Sequence[Proposal]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for one in proposals:
        found.setdefault(one.kind, {})[one.fix] = one.changes
    return found


def _trimmed(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.splitlines())
