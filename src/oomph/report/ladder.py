"""The ladder of a model, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from oomph.records import CardCost, Ladder, Largest, Rung
from oomph.report.as_json import sizes_to_json
from oomph.report.fixes import short_fix_word
from oomph.report.terminal import columns, is_size, printable, strip_lines
from oomph.units import format_bytes

_CARDS_SHOWN = 4
_LONGEST_REASON = 160  # characters
_VERDICTS = {"fits": "yes", "does not fit": "no", "too close to call": "too close to call"}


def ladder_text(found: Ladder, console: Console, commands: tuple[str, ...], priced: bool) -> str:
    """One screen. `commands`: what to do next, with the model as it was typed."""
    of_card = found.limit is not None
    rows = f"{found.batch:,} row{'s' if found.batch > 1 else ''} of {found.tokens:,} tokens"
    card = ""
    if found.limit is not None:
        has = "" if is_size(str(found.gpu)) else f" ({format_bytes(found.limit + found.context)})"
        card = f", on {found.gpu_title}{has}"
    heading = ["left method", "right needs"]
    heading += ["fold fits", "fold largest that fits"] if of_card else []
    table = columns(*heading)
    for rung in found.rungs:
        table.add_row(Text(rung.method, style="bold"), *_cells(rung, of_card))
    with console.capture() as capture:
        console.print(Text(f"{found.model}, {rows}{card}", style="bold"))
        console.print(Padding(table, (1, 0, 0, 2)))
        for rung in found.rungs:
            if why := f"was not predicted: {rung.failed}" if rung.failed else rung.reason:
                reason = printable(why, _LONGEST_REASON)
                console.print(Padding(Text(f"{rung.method} {reason}"), (1, 0, 0, 2)))
        _print_cards(found, console, priced)
        _print_ranks(found, console)
        if commands:
            console.print("\nNext:")
        for command in commands:
            console.print(Text(f"    {command}"), soft_wrap=True)  # on one line, to be copied
    return strip_lines(capture.get())


def _cells(rung: Rung, of_card: bool) -> list[str]:
    if rung.peak is None:
        return ["?"]
    needs = [format_bytes(rung.peak.device)]
    if not of_card:
        return needs
    if rung.plan is None:
        return [*needs, _VERDICTS[str(rung.verdict)], "not known"]
    return [*needs, _fits(rung), _sizes(rung)]


def _fits(rung: Rung) -> str:
    plan = rung.plan
    assert plan is not None
    if not plan.fixes:
        closest = f"{_VERDICTS[str(rung.verdict)]}, and no fix that is allowed helps"
        return "yes" if plan.fits else (f"no: {plan.reason}" if plan.least else closest)
    names, needs = " + ".join(map(short_fix_word, plan.fixes)), format_bytes(plan.after.peak.device)
    if plan.fits:
        return f"with {names}: {needs}"
    return f"{'too close to call' if plan.after.too_close else 'no'}, {needs} also with {names}"


def _sizes(rung: Rung) -> str:
    found = [
        _size(largest, what)
        for what, largest in (("row", rung.batch), ("token", rung.length))
        if largest is not None
    ]
    return ", or ".join(found) or ("not known" if rung.reason else "-")


def _size(found: Largest, what: str) -> str:
    text = f"{found.size:,} {what}{'' if found.size == 1 else 's'}"
    return text if found.exact else f"about {text}"


def _print_cards(found: Ladder, console: Console, priced: bool) -> None:
    shown = [rung for rung in found.rungs if rung.peak is not None]
    if not shown:
        return
    by = "the cheapest first" if priced else "the smallest first"
    console.print(f"\nCards on which it fits without fixes, {by} (tokens/s by a roofline, estimated):")
    table = columns("left", "fold")
    for rung in shown:
        cards = ", ".join(map(_card, rung.cards[:_CARDS_SHOWN]))
        more = len(rung.cards) - _CARDS_SHOWN
        cards += f", and {more} more" if more > 0 else ""
        of = "those of the price table" if priced else "those that oomph knows"
        table.add_row(Text(rung.method, style="bold"), cards or f"none of {of}")
    console.print(Padding(table, (0, 0, 0, 2)))


def _card(card: CardCost) -> str:
    if card.tokens_per_second is None:
        return card.title
    price = ""
    if card.per_million_tokens is not None:
        price = f", {card.per_million_tokens:.3g} per million tokens"
    return f"{card.title} ({card.tokens_per_second:,.0f}/s{price})"


def _print_ranks(found: Ladder, console: Console) -> None:
    lines = []
    for rung in found.rungs:
        if rung.ranks and rung.rank_peak is not None:
            each = format_bytes(rung.rank_peak.device)
            if found.limit is not None and rung.rank_peak.reserved > found.limit:
                each += " without releasing cached memory,"
            lines.append(
                f"{rung.method}: {rung.ranks} x {found.gpu_title} with FSDP2 are enough, {each} each "
                "(without fixes; each with the batch above)"
            )
        elif rung.no_ranks:
            lines.append(f"{rung.method}: with several of these cards: {rung.no_ranks}")
    if lines:
        console.print()
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2)))


def ladder_to_json(found: Ladder) -> dict[str, Any]:
    return {
        "schema": 1,
        **{name: getattr(found, name) for name in ("model", "gpu", "limit", "batch", "tokens")},
        "fits": None if found.limit is None else found.fits,
        "methods": [_rung_to_json(rung) for rung in found.rungs],
        "seconds": found.seconds,
    }


def _rung_to_json(rung: Rung) -> dict[str, Any]:
    plan = rung.plan
    return {
        "method": rung.method,
        "failed": rung.failed or None,
        "reason": rung.reason or None,
        "peak": rung.peak and sizes_to_json(rung.peak),
        "verdict": rung.verdict,
        "fits": None if plan is None else plan.fits,
        "fixes": [] if plan is None else [asdict(use) for use in plan.fixes],
        "peak_with_fixes": plan and sizes_to_json(plan.after.peak),
        "largest_batch": rung.batch and asdict(rung.batch),
        "largest_length": rung.length and asdict(rung.length),
        "cards": [asdict(card) for card in rung.cards],
        "ranks": rung.ranks or None,
        "rank_peak": rung.rank_peak and sizes_to_json(rung.rank_peak),
        "no_ranks": rung.no_ranks or None,
    }
