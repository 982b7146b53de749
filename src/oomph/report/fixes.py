"""Fixes, proposals, plans and verifications, as text; all but plans as JSON, too."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.records import (
    COMPILED_STEP_TIMES,
    FixKind,
    FixUse,
    Largest,
    Plan,
    PredictedFixes,
    Prediction,
    Proposal,
    Verification,
)
from oomph.report.as_json import sizes_to_json
from oomph.report.terminal import (
    collapse_modules,
    columns,
    distinct_sizes,
    is_limited,
    is_size,
    notes_table,
    printable,
    strip_lines,
    verdict,
)
from oomph.units import MiB, counted, format_bytes

_ALTERNATIVE = 0.9  # x the memory of a plan: sets that need less, and more time, are shown
_CONDITIONAL = "(?)"  # marks a fix that is exact on a condition
_FITS = {True: "yes", False: "no", None: "?"}
_JUST, _CLOSE = "just", "close"
_LEGEND = {
    _JUST: "only because the allocator releases cached memory",
    _CLOSE: "too close to call: within the margin of the prediction",
}
_DIFFERENCES_SHOWN = 8
_WHERE_WIDTH = 16  # characters, at least
_LONGEST_WORDS = 120  # characters of a command's options

# The launch line with `oomph run` and these options in it; "" where that is not known.
RunLine = Callable[..., str]


def fix_word(use: FixUse | Proposal, longest_list: int | None = None) -> str:
    """As the user types it: `micro_batches:parts=4`. Of lists longer than so many characters, the length."""

    def text(value: Any) -> str:
        if isinstance(value, str):
            return value
        plain = json.dumps(value)
        too_long = isinstance(value, list) and len(plain) > (longest_list or len(plain))
        return f"[{len(value)} names]" if too_long else plain

    options = ",".join(f"{key}={text(value)}" for key, value in use.options.items())
    return f"{use.fix}:{options}" if options else use.fix


def short_fix_word(use: FixUse | Proposal) -> str:
    """For a column of a table; the JSON has all names."""
    return fix_word(use, longest_list=30)


# ---------------------------------------------------------------------------------------------- proposals


def proposals_to_json(prediction: Prediction, proposals: Sequence[Proposal]) -> dict[str, Any]:
    """`fits` is null without a GPU, `peak` where the fix could not be predicted."""
    return {
        "schema": 1,
        "gpu": prediction.gpu,
        "limit": prediction.limit,
        "fits": prediction.fits,
        "peak": sizes_to_json(prediction.peak),
        "fixes": [
            {
                **vars(one),
                "options": dict(one.options),
                "peak": one.peak and sizes_to_json(one.peak),
                "fits": one.fits,
            }
            for one in proposals
        ],
    }


def proposals_text(
    prediction: Prediction,
    proposals: Sequence[Proposal],
    kinds: Iterable[FixKind],
    console: Console,
    target: str,
    fit: str,
) -> str:
    """The headline of `predict`, then a table of fixes. `target`: as typed; `fit`: `oomph fit` for it."""
    with console.capture() as capture:
        line = verdict(prediction).line
        console.print(Text(f"{line[0].upper()}{line[1:]}."))
        if not proposals:
            console.print(f"No fix of the kinds {', '.join(kinds)} lowers the peak.")
        else:
            if not is_limited(prediction):
                context = format_bytes(prediction.peak.device - prediction.peak.reserved)
                console.print(f"What a fix needs includes the CUDA context's {context}.")
            console.print("Each fix by itself, predicted:")
            console.print(Padding(_proposals_table(prediction, proposals), (1, 0, 1, 2)))
            marks = {_fits(one, prediction) for one in proposals} if prediction.fits is False else ()
            for mark, meaning in _LEGEND.items():
                if mark in marks:
                    console.print(f"  {mark}: {meaning}\n")
            for text, command in (
                *_how_many_fit(prediction, proposals, fit),
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


def _proposals_table(prediction: Prediction, proposals: Sequence[Proposal]) -> Table:
    does_not_fit, limited = prediction.fits is False, is_limited(prediction)
    fits_column = ["left fits"] if does_not_fit else []
    table = columns("fold fix", "right saves", "right needs", *fits_column, "right time", "fold where")
    table.columns[-1].min_width = _WHERE_WIDTH
    for one in proposals:
        mark = f" {_CONDITIONAL}" if one.condition else ""
        fits = [Text(_fits(one, prediction), style="bold green" if one.fits else "")]
        table.add_row(
            short_fix_word(one) + mark,
            "?" if one.saving is None else format_bytes(one.saving),
            "?" if one.peak is None else format_bytes(one.peak.reserved if limited else one.peak.device),
            *(fits if does_not_fit else []),
            "?" if one.slowdown is None else f"x{one.slowdown:.2f}",
            collapse_modules(one.where) or "the whole model",
        )
    return table


def _fits(one: Proposal, prediction: Prediction) -> str:
    if one.fits and one.peak is not None and one.peak.reserved > (prediction.limit or one.peak.reserved):
        return _JUST
    if one.verdict == "too close to call":
        return _CLOSE
    return _FITS[one.fits]


_Advice = tuple[str, str]  # a sentence, and the command that follows it


def _how_many_fit(prediction: Prediction, proposals: Sequence[Proposal], fit: str) -> list[_Advice]:
    if prediction.fits is not False:
        return []
    marks = [_fits(one, prediction) for one in proposals]
    fitting = marks.count(_FITS[True])
    result = f"{fitting} of {len(proposals)} rows make it fit" if fitting else "No row makes it fit by itself"
    for mark in (_JUST, _CLOSE):
        result += f", {marks.count(mark)} {mark}" if mark in marks else ""
    kinds = ",".join(dict.fromkeys(one.kind for one in proposals if one.kind != "exact"))
    return [(f"{result}. The cheapest set that fits:", f"{fit} --allow {kinds}" if kinds else fit)]


def _conditions(proposals: Sequence[Proposal], target: str) -> list[_Advice]:
    # The last proposal of a fix saves least: two parts are possible with a small batch, too.
    last = {(one.fix, one.condition): one for one in proposals if one.condition}
    return [
        (
            f"{_CONDITIONAL} exact only if {one.condition}. To check, on a small version of it:",
            f"oomph verify {target} {short_fix_word(one)}",
        )
        for one in last.values()
    ]


def _sentences(proposals: Sequence[Proposal]) -> dict[str, list[tuple[str, str]]]:
    """What the fixes change, by kind; then the notes."""
    found: dict[str, dict[tuple[str, str], None]] = {}
    for one in proposals:
        heading = f"{one.kind}, on a condition {_CONDITIONAL}" if one.condition else one.kind
        found.setdefault(heading, {})[one.fix, one.changes] = None
    notes: dict[tuple[str, str], list[str]] = {}
    for one in proposals:
        if one.note:
            notes.setdefault((one.fix, one.note), []).append(short_fix_word(one))
    if notes:  # of a fix with other options, if they are the same
        found["notes"] = {
            (words[0] if len(words) == 1 else fix, note): None for (fix, note), words in notes.items()
        }
    return {heading: list(sentences) for heading, sentences in found.items()}


# --------------------------------------------------------------------------------------------------- plans


def plan_text(
    plan: Plan,
    console: Console,
    target: str,
    file: str | None,
    cards: Sequence[tuple[str, bool, bool]] = (),
    run_line: RunLine | None = None,
) -> str:
    """Verdict, fixes, before and after, and how to apply them.

    `target`: as typed. `file`: where the plan was written.
    `cards`: title, and whether the step fits without fixes and with them. `run_line`: see `apply_commands`.
    """
    with console.capture() as capture:
        console.print(Text(plan_verdict(plan), style="bold green" if plan.fits else "bold red"))
        if plan.growth:
            console.print(
                f"Memory grows by {format_bytes(plan.growth)} with every step or call of the model, which no "
                f"fix stops: `oomph diagnose {target}` names the line."
            )
        if plan.fixes:
            console.print(Padding(_fixes_table(plan), (1, 0, 1, 2)))
        if remarks := [*(f"exact only if {each}" for each in plan.conditions), *plan.remarks]:
            console.print(Padding(Text("\n".join(remarks)), (0, 0, 1, 2)))
        if any(use.fix == "compile" for use in plan.fixes):
            console.print(f"  {COMPILED_STEP_TIMES}")
        if plan.after.host_bytes >= MiB:
            console.print(f"  pinned host memory: {format_bytes(plan.after.host_bytes)}")
        if plan.needs:
            kinds = ",".join(kind for kind in plan.needs if kind != "exact")
            console.print(f"It fits if fixes that change the numbers are allowed: --allow {kinds}")
        elif plan.least:
            console.print("No fix makes them small enough: use a smaller model or a larger card.")
        elif plan.reason:
            console.print(Text(f"No fix can be applied: {plan.reason}."))
            console.print(
                "By hand: a smaller batch or shorter input; `oomph diagnose` names what takes the memory."
            )
        elif not plan.fits:
            known = "known to be " if plan.after.too_close else ""
            which = "No fix that could be predicted" if plan.failed else "No fix"
            batch = "batch in evaluation" if plan.after.peak.stage == "evaluation" else "batch"
            console.print(f"{which} is {known}enough: use a smaller {batch}, shorter input or a larger card.")
        if line := rows_line(plan):
            console.print(Text(line))
        if plan.failed:
            console.print("Not used:")
            console.print(Padding(Text("\n".join(failed_lines(plan))), (0, 0, 1, 2)))
        sets_allocator = any(use.fix == "allocator" for use in plan.fixes)
        if not plan.fits and plan.after.peak.allocated <= plan.limit and not sets_allocator:
            console.print(
                "Its tensors alone would fit. To predict and run it with another allocator, set the "
                "environment variable PYTORCH_ALLOC_CONF=expandable_segments:True."
            )
        if "compile" not in plan.allowed and not plan.least and not (plan.fits and plan.after.slowdown <= 1):
            console.print("Not tried: torch.compile, which is slow to predict (--allow compile).")
        if plan.fixes and plan.fits:
            how, commands = apply_commands(plan, target, file, run_line)
            console.print(Text(f"{how}:"))
            for command in commands:
                console.print(Text(f"    {command}"), soft_wrap=True)  # on one line, to be copied
            console.print()
        elif plan.fixes and file is not None:
            fits = "may not fit" if plan.after.too_close else "does not fit"
            console.print(Text(f"The plan in {file} {fits}."))
        most = _ALTERNATIVE * plan.after.peak.device
        smaller = [one for one in plan.front if one.fits and one.fixes and one.peak.device < most]
        if smaller:
            console.print("Other sets that need less memory (~ estimated):")
            console.print(Padding(_front_table(smaller), (1, 0, 1, 2)))
        for line in largest_lines(plan):
            console.print(Text(line))
        if cards:
            console.print(Padding(_cards_table(cards), (0, 0, 1, 2)))
        if plan.notes:
            console.print("Notes on the prediction without fixes:")
            console.print(Padding(notes_table(plan.notes), (0, 0, 1, 2)))
        console.print(f"{counted(plan.predictions, 'prediction')} in {plan.seconds:.0f} s")
    return strip_lines(capture.get())


def plan_verdict(plan: Plan) -> str:
    before, after = plan.before.peak.device, plan.after.peak.device
    context = plan.after.peak.device - plan.after.peak.reserved
    needs, there_is = distinct_sizes(after, plan.limit + context)
    where, has = plan.gpu_title, "" if is_size(plan.gpu) else f"; it has {there_is}"
    if plan.is_budget:
        what = f"budget of {there_is} (CUDA context included)"
        if plan.is_max:
            what = f"allocator limit of {format_bytes(plan.limit)} ({there_is} with the CUDA context)"
        where, has = f"the {what} on {plan.gpu_title}", ""
    released = ""
    if plan.fits and after > plan.limit + context:
        released, needs = ", but only by releasing cached memory", f"{needs} without releasing it"
    if plan.fits and not plan.fixes:
        return f"fits {where} without fixes{released}: needs {needs}{has}"
    if plan.least:
        beside = "" if plan.is_max else f", and the CUDA context {format_bytes(context)}"
        return f"does not fit {where}: {plan.reason}{beside}{has}"
    verdict = "fits" if plan.fits else "does not fit"
    if plan.after.too_close:
        verdict, needs = "too close to call for", f"{needs}, margin {format_bytes(plan.after.margin)}"
        if after > plan.limit + context + plan.after.margin:
            needs += ", less if cached memory is released"
    if not plan.fixes:
        none = "no fix lowers the peak"
        if plan.failed:
            none = f"no fix that could be predicted lowers the peak ({len(plan.failed)} could not)"
        return f"{verdict} {where}, and {none}: needs {needs}{has}"
    return (
        f"{verdict} {where} with {len(plan.fixes)} fix{'es' if len(plan.fixes) > 1 else ''}{released}: "
        f"{format_bytes(before)} -> {needs}{has}; step time x{plan.after.slowdown:.2f}"
    )


def failed_lines(plan: Plan) -> list[str]:
    """What could not be predicted or changes the result, and why."""
    names = [" + ".join(map(short_fix_word, one.fixes)) for one in plan.failed]
    reasons = [printable(one.reason.split("\n")[0], _LONGEST_WORDS) for one in plan.failed]
    return [f"{name}: {reason}" for name, reason in zip(names, reasons, strict=True)]


def ranks_text(trials: Sequence[Any], gpu: str) -> str:
    """How many cards FSDP2 needs. `trials`: by number of ranks, the last is enough or none is."""
    if not trials:
        return ""
    last = trials[-1]
    lines = [f"\nWithout fixes, {last.ranks} x {gpu} with FSDP2 are enough (the batch is that of one rank):"]
    if not last.fits:
        lines = [f"\nNo number of {gpu} is enough with FSDP2, which does not divide activations:"]
    for one in trials:
        time = "" if one.step_seconds is None else f", {one.step_seconds:.3g} s a step by a roofline"
        sent = f", sends {format_bytes(one.sent)}" if one.sent else ""
        lines.append(f"  {one.ranks:5} ranks: {format_bytes(one.peak.device)} each{sent}{time}")
    return "\n".join(lines) + "\n"


def largest_lines(plan: Plan) -> list[str]:
    lines = []
    for what, found in plan.largest.items():
        with_plan = f", {_largest(found['with'])} with the plan" if plan.fixes else ""
        lines.append(f"Largest {what} that fits: {_largest(found['without'])} without fixes{with_plan}.")
    return lines


def _largest(found: Largest) -> str:
    if not found.exact:
        return f"at least {found.size:,}"
    return f"{found.size:,}{' (the program fails with more)' if found.fails else ''}"


def rows_line(plan: Plan) -> str:
    """What batch a plan that does not fit would leave room for."""
    if plan.no_rows:
        return f"Which batch would fit was not searched: {plan.no_rows}."
    if plan.rows_that_fit is None:
        return ""
    fixes = " with these fixes" if plan.fixes else ""
    if not plan.rows_that_fit:
        return f"Not even a batch of 1 would fit{fixes}."
    would_fit = f"A batch of {plan.rows_that_fit:,} instead of {plan.rows:,} would fit{fixes}"
    if plan.after.peak.stage == "evaluation":
        return f"{would_fit}."
    times = plan.rows // plan.rows_that_fit
    return (
        f"{would_fit}: accumulate the gradients of {times:,} times as many passes, each with its loss "
        f"divided by {times:,}."
    )


def _fixes_table(plan: Plan) -> Table:
    table = columns("fold")
    for use in plan.fixes:
        table.add_row(Text(short_fix_word(use), style="bold"))
    return table


def _front_table(front: Sequence[PredictedFixes]) -> Table:
    table = columns("right needs", "right time", "fold fixes")
    for one in front:
        about = "~" if one.estimated else ""
        needs, time = f"{about}{format_bytes(one.peak.device)}", f"{about}x{one.slowdown:.2f}"
        table.add_row(needs, time, " + ".join(map(short_fix_word, one.fixes)))
    return table


def _cards_table(cards: Sequence[tuple[str, bool, bool]]) -> Table:
    table = columns("left card", "left without fixes", "left with the plan")
    for title, without, with_fixes in cards:
        table.add_row(title, "fits" if without else "no", "fits" if with_fixes else "no")
    return table


def apply_commands(
    plan: Plan, target: str, file: str | None, run_line: RunLine | None = None
) -> tuple[str, tuple[str, ...]]:
    """How to apply a plan, and the commands. `target`: as typed. Without a file the fixes are typed out,
    unless that is too long to be read or copied. `run_line`: where `oomph run` does not start the target, a
    launch line of several ranks."""
    words = " ".join(f"--fix '{fix_word(use)}'" for use in plan.fixes)
    how = "To apply it"
    if file is None and len(words) > _LONGEST_WORDS:
        file = "plan.json"
        how = f"To apply it, add `--plan {file}` to the command `oomph fit`, which writes it there; then"
    applied = words if file is None else f"--plan {file}"
    given = f'"{file}"' if file else json.dumps([fix_word(use) for use in plan.fixes])
    in_python = f"oomph.apply({given}, workload_or_model)   # in Python"
    if run_line is not None:
        found = run_line(*shlex.split(applied))
        return (f"{how}, without editing the script", (found,)) if found else (how, (in_python,))
    if target.startswith("-") or target.partition(" ")[0].endswith((".py", ".ipynb")):
        return f"{how}, without editing the script", (f"oomph run {applied} {target}",)
    trains = file is not None and target.partition(" ")[0].endswith((".yaml", ".yml"))
    command = f"oomph {'train' if trains else 'predict'} {target} {applied}"
    return how, (command, in_python)


# ------------------------------------------------------------------------------------------- verifications


def verification_text(found: Verification) -> str:
    names = ", ".join(found.fixes)
    if found.tolerance is None:
        result = f"{names}: changes the numbers by design ({found.kind}); not compared with a tolerance"
    elif found.holds:
        result = f"{names}: the same loss, gradients and parameters, within {found.tolerance:g}"
    else:
        result = f"{names}: NOT the same; exact fixes may differ by at most {found.tolerance:g}"
    lines = [result, *found.notes, ""]
    count = len(found.differences)
    if any(each.error for each in found.differences):
        lines.append(
            f"  {count} tensors compared; the largest differences, relative to each tensor's maximum:"
        )
        lines += [f"  {each.error:9.2e}  {each.name}" for each in found.differences[:_DIFFERENCES_SHOWN]]
    else:
        lines.append(f"  {count} tensors compared; all are equal bit by bit")
    return "\n".join(lines) + "\n"


def verification_to_json(found: Verification) -> dict[str, Any]:
    """`error` is null where a tensor is missing, has another shape, or is not finite."""
    return {
        "schema": 1,
        "holds": found.holds,
        "fixes": list(found.fixes),
        "kind": found.kind,
        "tolerance": found.tolerance,
        "notes": list(found.notes),
        "differences": [
            {"name": each.name, "error": each.error if math.isfinite(each.error) else None}
            for each in found.differences
        ],
    }
