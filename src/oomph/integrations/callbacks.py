"""What the callbacks of trainers share: peaks for the log, and a report where memory runs out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from oomph.measurement.oplog import record_history
from oomph.report.html import Page, write_html
from oomph.report.recording import recording_of
from oomph.report.terminal import report_console, report_text

DEFAULT_FILE = "out-of-memory.html"


def report_out_of_memory(file: str | Path = DEFAULT_FILE) -> None:
    """Call it before training, on a machine with a GPU. The first request that fails writes the report.

    The report goes to stderr and, as a page, to `file`: what was alive, from which lines, and what the
    request was for.
    """

    def write(snapshot: Any) -> None:
        recorded = recording_of(snapshot, sys.argv[0] or "the program")
        print(report_text(recorded, report_console(sys.stderr)), file=sys.stderr)
        write_html(file, Page(sys.argv[0], [("recorded", recorded)]))
        print(f"oomph: the report is in {file}", file=sys.stderr)

    if torch.cuda.device_count():
        record_history(write)


def peaks() -> dict[str, float]:
    """Since the last call, in GiB; empty without a GPU."""
    if not torch.cuda.is_initialized():
        return {}
    found = {
        "memory/peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "memory/peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }
    torch.cuda.reset_peak_memory_stats()
    return {name: round(value, 3) for name, value in found.items()}
