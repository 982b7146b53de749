"""`oomph gpus`: the GPUs that `--gpu` accepts by name."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from oomph import gpus
from oomph.cli.common import Json, write_json, write_stdout
from oomph.report.terminal import columns, report_console, strip_lines
from oomph.units import format_bytes


def run_gpus(as_json: Json = False) -> int:
    """List the GPUs that --gpu accepts by name."""
    cards = gpus.catalogue()
    if as_json:
        write_json({"schema": 1, "gpus": [_card(card) for card in cards]})
    else:
        write_stdout(_table(list(cards)))
    return 0


def _card(card: gpus.GPU) -> dict[str, Any]:
    return {
        "name": card.name,
        "title": card.title,
        "memory": card.memory,
        "capability": f"{card.capability[0]}.{card.capability[1]}",
        "bf16_tflops": card.bf16_tflops,
        "has_bf16": card.has_bf16,
        "bandwidth": card.bandwidth,
        "context": card.context,
    }


def _rate(card: gpus.GPU) -> str:
    if card.bf16_tflops is None:
        return "-"
    # Without bf16 tensor cores the catalogue has the fp16 rate.
    return f"{'' if card.has_bf16 else 'fp16 '}{card.bf16_tflops:,.0f}"


def _table(cards: list[gpus.GPU]) -> str:
    console = report_console()
    table = columns(
        *("left name", "fold GPU", "right memory", "right capability"),
        *("right bf16 TFLOP/s", "right bandwidth GB/s"),
    )
    for card in cards:
        table.add_row(
            Text(card.name, "cyan"),
            card.title,
            format_bytes(card.memory),
            f"{card.capability[0]}.{card.capability[1]}",
            _rate(card),
            f"{card.bandwidth / 1e9:,.0f}" if card.bandwidth else "-",
        )
    with console.capture() as capture:
        console.print(table)
        console.print("\nmemory: as torch reports it; --gpu also accepts a size, e.g. --gpu 24GiB")
    return strip_lines(capture.get())
