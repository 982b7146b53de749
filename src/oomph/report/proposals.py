"""Fixes for people and for programs: what each changes, saves and costs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.records import FixKind, Peak, Prediction, Proposal
from oomph.report.terminal import verdict
from oomph.units import format_bytes

_LONGEST_LIST = 30
_MARK = "(?)"  # beside a fix that holds on a condition
_FITS = {True: "yes", False: "no", None: "?"}


def proposals_to_json(prediction: Prediction, proposals: Sequence[Proposal]) -> dict[str, Any]:
    """Peaks are the allocator's, and with the CUDA context the device's; `fits` is null without a GPU."""
    return {
        "schema": 1,
        "gpu": prediction.gpu,
        "limit": prediction.limit,
        "fits": prediction.fits,
        "peak": _peak_to_json(prediction.peak),
        "fixes": [
            {
                "fix": one.fix,
                "options": dict(one.options),
                "kind": one.kind,
                "changes": one.changes,
                "where": list(one.where),
                "saving": one.saving,
                "slowdown": one.slowdown,
                "peak": None if one.peak is None else _peak_to_json(one.peak),
                "fits": one.fits,
                "condition": one.condition,
                "note": one.note,
            }
            for one in proposals
        ],
    }


def _peak_to_json(peak: Peak) -> dict[str, int]:
    return {"allocated": peak.allocated, "reserved": peak.reserved, "device": peak.device}


def proposals_text(
    prediction: Prediction,
    proposals: Sequence[Proposal],
    kinds: Iterable[FixKind],
    console: Console,
    target: str = "TARGET",
) -> str:
    """Opens with the headline of `oomph predict`; what it and the table say is needed has the CUDA context
    in. `target`: as it was typed, for commands to type next."""
    with console.capture() as capture:
        line = verdict(prediction).line
        context = format_bytes(prediction.peak.device - prediction.peak.reserved)
        console.print(
            Text(f"{line[0].upper()}{line[1:]}. The CUDA context's {context} are in these figures.")
        )
        if not proposals:
            console.print(f"No fix of the kinds {', '.join(kinds)} lowers it.")
        else:
            console.print("Each fix by itself, predicted:")
            console.print(Padding(_table(prediction, proposals), (1, 0, 1, 2)))
            for text, command in (
                *_how_many_fit(prediction, proposals, target),
                *_conditions(proposals, target),
            ):
                console.print(Padding(Text(text), (0, 0, 0, 2)))
                console.print(Text(f"    {command}\n"), soft_wrap=True)  # whole, to be copied
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


def _table(prediction: Prediction, proposals: Sequence[Proposal]) -> Table:
    """A column tells which fix makes it fit, where it does not fit by itself."""
    to_fit = prediction.fits is False
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for title, justify in (("fix", "left"), ("saves", "right"), ("needs", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    if to_fit:
        table.add_column("fits", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("where")
    for one in proposals:
        mark = f" {_MARK}" if one.condition else ""
        table.add_row(
            _with_options(one.fix, one.options) + mark,
            "?" if one.saving is None else format_bytes(one.saving),
            "?" if one.peak is None else format_bytes(one.peak.device),
            *([Text(_fits(one, prediction), style="bold green" if one.fits else "")] if to_fit else []),
            "?" if one.slowdown is None else f"x{one.slowdown:.2f}",
            _where(one),
        )
    return table


def _fits(one: Proposal, prediction: Prediction) -> str:
    """`just`: what is cached has to be given back for it, as the headline of a prediction with it says."""
    if one.fits and one.peak is not None and one.peak.reserved > (prediction.limit or one.peak.reserved):
        return "just"
    return _FITS[one.fits]


_Advice = tuple[str, str]  # a sentence, and the command that it ends in


def _how_many_fit(prediction: Prediction, proposals: Sequence[Proposal], target: str) -> list[_Advice]:
    if prediction.fits is not False:
        return []
    fitting = sum(one.fits is True for one in proposals)
    said = f"{fitting} of {len(proposals)} rows make it fit." if fitting else "No row makes it fit by itself."
    several = f"oomph predict {target} --gpu {prediction.gpu} --fix A --fix B"
    return [(f"{said} To try several together:", several)]


def _conditions(proposals: Sequence[Proposal], target: str) -> list[_Advice]:
    """For each fix that holds on a condition."""
    # By the one that saves least: two parts can be had of a small batch, too.
    least = {(one.fix, one.condition): one for one in proposals if one.condition}
    return [
        (
            f"{_MARK} the same only if {one.condition}. To check, on a small form of it:",
            f"oomph verify {target} {_with_options(one.fix, one.options)}",
        )
        for one in least.values()
    ]


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
        return ", ".join(name or "the whole model" for name in one.where)
    return f"{one.where[0]} .. {one.where[-1]} ({len(one.where)})"


def _sentences(proposals: Sequence[Proposal]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for one in proposals:
        heading = f"{one.kind}, on a condition {_MARK}" if one.condition else one.kind
        found.setdefault(heading, {})[one.fix] = one.changes
    return found


def _trimmed(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.splitlines())
