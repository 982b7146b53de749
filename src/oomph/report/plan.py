"""A plan, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from oomph.records import FixUse, Plan, PricedFixes
from oomph.report.terminal import distinct_sizes, strip_lines
from oomph.units import MiB, format_bytes

_MOST_NAMES = 3  # of a list among a fix's options
_LONGEST_WORDS = 120  # characters of a command's options


def fix_word(use: FixUse) -> str:
    """As the user types it: `micro_batches:parts=4`."""
    options = ",".join(f"{key}={_plain(value)}" for key, value in use.options.items())
    return f"{use.fix}:{options}" if options else use.fix


def plan_text(
    plan: Plan,
    console: Console,
    target: str,
    file: str | None,
    largest: Mapping[str, tuple[tuple[int, bool], tuple[int, bool]]] | None = None,
    cards: Sequence[tuple[str, bool, bool]] = (),
) -> str:
    """Verdict, fixes, before and after, and how to apply them.

    `target`: as typed. `file`: where the plan was written. `largest`: sizes that fit, and whether no larger
    ones do, without fixes and with.
    `cards`: title, and whether the step fits without fixes and with them.
    """
    with console.capture() as capture:
        console.print(Text(plan_verdict(plan), style="bold green" if plan.fits else "bold red"))
        if plan.fixes:
            console.print(Padding(_fixes_table(plan), (1, 0, 1, 2)))
        for condition in plan.conditions:
            console.print(Text(f"  exact only if {condition}"))
        if any(use.fix == "compile" for use in plan.fixes):
            console.print("  step times under torch.compile have not been compared with measured ones")
        if plan.after.host_bytes >= MiB:
            console.print(f"  pinned host memory: {format_bytes(plan.after.host_bytes)}")
        if plan.needs:
            kinds = ",".join(kind for kind in plan.needs if kind != "exact")
            console.print(f"It fits if fixes that change the numbers are allowed: --allow {kinds}")
        elif plan.reason:
            console.print(Text(f"No fix can be applied: {plan.reason}."))
            console.print(
                "By hand: a smaller batch or shorter input; `oomph diagnose` names what takes the memory."
            )
        elif not plan.fits:
            console.print("No fix is enough: take a smaller batch, shorter input or a larger card.")
        if "compile" not in plan.allowed and not (plan.fits and plan.after.slowdown <= 1):
            console.print("Not tried: torch.compile, which is slow to predict (--allow compile).")
        if plan.fixes and plan.fits:
            _print_commands(console, plan, target, file)
        smaller = [one for one in plan.front if one.fits and one.fixes and one.fixes != plan.fixes]
        if smaller:
            console.print("For more time, less memory (~ estimated):")
            console.print(Padding(_front_table(smaller), (1, 0, 1, 2)))
        for name, (without, with_fixes) in (largest or {}).items():
            console.print(
                f"largest {name} that fits: {_at_least(without)} without fixes, "
                f"{_at_least(with_fixes)} with the plan"
            )
        if cards:
            console.print(Padding(_cards_table(cards), (0, 0, 1, 2)))
        console.print(f"{plan.predictions} predictions in {plan.seconds:.0f} s")
    return strip_lines(capture.get())


def plan_verdict(plan: Plan) -> str:
    before, after = plan.before.peak.device, plan.after.peak.device
    context = plan.after.peak.device - plan.after.peak.reserved
    needs, there_is = distinct_sizes(after, plan.limit + context)
    if plan.fits and not plan.fixes:
        return f"fits {plan.gpu_title} as it is: needs {needs}; it has {there_is}"
    if not plan.fixes:
        found = "no fix was found that lowers the peak"
        return f"does not fit {plan.gpu_title}, and {found}: needs {needs}; it has {there_is}"
    verdict = "fits" if plan.fits else "does not fit"
    return (
        f"{verdict} {plan.gpu_title} with {len(plan.fixes)} fix{'es' if len(plan.fixes) > 1 else ''}: "
        f"{format_bytes(before)} -> {needs}; it has {there_is}; step time x{plan.after.slowdown:.2f}"
    )


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


def _at_least(largest: tuple[int, bool]) -> str:
    size, exact = largest
    return f"{size:,}" if exact else f"at least {size:,}"


def _fixes_table(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    for use in plan.fixes:
        table.add_row(Text(short_fix_word(use), style="bold"))
    return table


def _front_table(front: Sequence[PricedFixes]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("needs", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("fixes")
    for one in front:
        about = "~" if one.estimated else ""
        needs, time = f"{about}{format_bytes(one.peak.device)}", f"{about}x{one.slowdown:.2f}"
        table.add_row(needs, time, " + ".join(map(short_fix_word, one.fixes)))
    return table


def _cards_table(cards: Sequence[tuple[str, bool, bool]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for title in ("card", "as it is", "with the plan"):
        table.add_column(title, no_wrap=True)
    for title, without, with_fixes in cards:
        table.add_row(title, "fits" if without else "no", "fits" if with_fixes else "no")
    return table


def _print_commands(console: Console, plan: Plan, target: str, file: str | None) -> None:
    """Without a file the fixes are typed out, unless that is too long to be read or copied."""
    words = " ".join(f"--fix '{fix_word(use)}'" for use in plan.fixes)
    how = "To apply it"
    if file is None and len(words) > _LONGEST_WORDS:
        file = "plan.json"
        how = f"To apply it, add `--plan {file}` to the command `oomph fit`, which writes it there; then"
    applied = words if file is None else f"--plan {file}"
    if target.partition(" ")[0].endswith(".py"):
        console.print(Text(f"{how}, without editing the script:"))
        console.print(Text(f"    oomph run {applied} {target}\n"), soft_wrap=True)
        return
    trains = file is not None and target.partition(" ")[0].endswith((".yaml", ".yml"))
    given = f'"{file}"' if file else json.dumps([fix_word(use) for use in plan.fixes])
    console.print(Text(f"{how}:"))
    console.print(Text(f"    oomph {'train' if trains else 'predict'} {target} {applied}"), soft_wrap=True)
    console.print(Text(f"    oomph.apply({given}, workload_or_model)   # in Python\n"), soft_wrap=True)


def short_fix_word(use: FixUse) -> str:
    return fix_word(
        FixUse(
            use.fix,
            {
                key: f"[{len(value)} names]"
                if isinstance(value, list) and len(value) > _MOST_NAMES
                else value
                for key, value in use.options.items()
            },
        )
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
