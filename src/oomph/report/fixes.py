"""Fixes, proposals and verifications, as text and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.records import FixKind, Peak, Prediction, Proposal, Verification
from oomph.report.terminal import strip_lines, verdict
from oomph.units import format_bytes

_LONGEST_LIST = 30  # characters
_CONDITIONAL = "(?)"  # marks a fix that is exact on a condition
_FITS = {True: "yes", False: "no", None: "?"}
_JUST, _CLOSE = "just", "close"
_LEGEND = {
    _JUST: "only because the allocator releases cached memory",
    _CLOSE: "too close to call: within the margin of the prediction",
}
_DIFFERENCES_SHOWN = 8


def proposals_to_json(prediction: Prediction, proposals: Sequence[Proposal]) -> dict[str, Any]:
    """`fits` is null without a GPU, `peak` where the fix could not be predicted."""
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
                "verdict": one.verdict,
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
    """The headline of `oomph predict`, then a table of fixes. `target`: as typed, for suggested commands."""
    with console.capture() as capture:
        line = verdict(prediction).line
        context = format_bytes(prediction.peak.device - prediction.peak.reserved)
        console.print(
            Text(f"{line[0].upper()}{line[1:]}. These figures include the CUDA context's {context}.")
        )
        if not proposals:
            console.print(f"No fix of the kinds {', '.join(kinds)} lowers it.")
        else:
            console.print("Each fix by itself, predicted:")
            console.print(Padding(_table(prediction, proposals), (1, 0, 1, 2)))
            marks = {_fits(one, prediction) for one in proposals} if prediction.fits is False else ()
            for mark, meaning in _LEGEND.items():
                if mark in marks:
                    console.print(f"  {mark}: {meaning}\n")
            for text, command in (
                *_how_many_fit(prediction, proposals, target),
                *_conditions(proposals, target),
            ):
                console.print(Padding(Text(text), (0, 0, 0, 2)))
                console.print(Text(f"    {command}\n"), soft_wrap=True)  # on one line, to be copied
            for heading, sentences in _sentences(proposals).items():
                console.print(Text(f"  {heading}", style="bold"))
                for name, sentence in sentences:
                    console.print(Padding(Text(f"{name}: {sentence}"), (0, 0, 0, 4)))
        missing = [kind for kind in ("precision", "training") if kind not in kinds]
        if missing:
            console.print(f"\nNot shown: fixes that change the numbers (--allow {','.join(missing)}).")
        if "compile" not in kinds:
            console.print("Not tried: torch.compile, which is slow to predict (--allow compile).")
    return strip_lines(capture.get())


def all_fixes_text(rows: Sequence[tuple[str, str, str]], console: Console) -> str:
    """Name, kind and what changes, of every fix."""
    table = Table.grid(padding=(0, 2))
    for name, kind, changes in rows:
        table.add_row(Text(name, style="bold"), kind, changes)
    with console.capture() as capture:
        console.print(table)
        console.print("\n`oomph fixes TARGET` lists those that apply, with what each saves and costs.")
    return strip_lines(capture.get())


def _table(prediction: Prediction, proposals: Sequence[Proposal]) -> Table:
    does_not_fit = prediction.fits is False
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for title, justify in (("fix", "left"), ("saves", "right"), ("needs", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    if does_not_fit:
        table.add_column("fits", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("where")
    for one in proposals:
        mark = f" {_CONDITIONAL}" if one.condition else ""
        fits = [Text(_fits(one, prediction), style="bold green" if one.fits else "")]
        table.add_row(
            _with_options(one.fix, one.options) + mark,
            "?" if one.saving is None else format_bytes(one.saving),
            "?" if one.peak is None else format_bytes(one.peak.device),
            *(fits if does_not_fit else []),
            "?" if one.slowdown is None else f"x{one.slowdown:.2f}",
            _where(one),
        )
    return table


def _fits(one: Proposal, prediction: Prediction) -> str:
    if one.fits and one.peak is not None and one.peak.reserved > (prediction.limit or one.peak.reserved):
        return _JUST
    if one.verdict == "too close to call":
        return _CLOSE
    return _FITS[one.fits]


_Advice = tuple[str, str]  # a sentence, and the command that follows it


def _how_many_fit(prediction: Prediction, proposals: Sequence[Proposal], target: str) -> list[_Advice]:
    if prediction.fits is not False:
        return []
    marks = [_fits(one, prediction) for one in proposals]
    fitting = marks.count(_FITS[True])
    result = f"{fitting} of {len(proposals)} rows make it fit" if fitting else "No row makes it fit by itself"
    for mark in (_JUST, _CLOSE):
        result += f", {marks.count(mark)} {mark}" if mark in marks else ""
    kinds = ",".join(dict.fromkeys(one.kind for one in proposals if one.kind != "exact"))
    command = f"oomph fit {target} --gpu {prediction.gpu}{f' --allow {kinds}' if kinds else ''}"
    return [(f"{result}. The cheapest set that fits:", command)]


def _conditions(proposals: Sequence[Proposal], target: str) -> list[_Advice]:
    # The last proposal of a fix saves least: two parts are possible with a small batch, too.
    last = {(one.fix, one.condition): one for one in proposals if one.condition}
    return [
        (
            f"{_CONDITIONAL} exact only if {one.condition}. To check, on a small version of it:",
            f"oomph verify {target} {_with_options(one.fix, one.options)}",
        )
        for one in last.values()
    ]


def _with_options(name: str, options: Mapping[str, Any]) -> str:
    """As it can be typed, except for lists that are too long for a column: the JSON has them."""
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


def _sentences(proposals: Sequence[Proposal]) -> dict[str, list[tuple[str, str]]]:
    """What the fixes change, by kind; then the notes."""
    found: dict[str, dict[tuple[str, str], None]] = {}
    for one in proposals:
        heading = f"{one.kind}, on a condition {_CONDITIONAL}" if one.condition else one.kind
        found.setdefault(heading, {})[one.fix, one.changes] = None
    notes = {(one.fix, one.note): None for one in proposals if one.note}
    if notes:
        found["notes"] = notes
    return {heading: list(sentences) for heading, sentences in found.items()}


def verification_text(found: Verification) -> str:
    names = ", ".join(found.fixes)
    if found.tolerance is None:
        result = f"{names}: changes the numbers by design ({found.kind}); not compared with a tolerance"
    elif found.holds:
        result = f"{names}: the same loss, gradients and parameters, within {found.tolerance:g}"
    else:
        result = f"{names}: NOT the same; exact fixes may differ by at most {found.tolerance:g}"
    count = len(found.differences)
    lines = [
        result,
        "",
        f"  {count} tensors compared; the largest differences, relative to each tensor's maximum:",
    ]
    lines += [f"  {each.error:9.2e}  {each.name}" for each in found.differences[:_DIFFERENCES_SHOWN]]
    return "\n".join(lines) + "\n"


def verification_to_json(found: Verification) -> dict[str, Any]:
    """`error` is null where a tensor is missing, has another shape, or is not finite."""
    return {
        "schema": 1,
        "holds": found.holds,
        "fixes": list(found.fixes),
        "kind": found.kind,
        "tolerance": found.tolerance,
        "differences": [
            {"name": each.name, "error": each.error if math.isfinite(each.error) else None}
            for each in found.differences
        ],
    }
