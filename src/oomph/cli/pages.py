"""`--html`: the report as one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomph import gpus
from oomph.errors import UserError
from oomph.records import Prediction


def check_output_file(option: str, file: str | None, example: str) -> None:
    """Raise for a file that cannot be written, before anything is traced."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise UserError(f"{option} {file!r} is a directory; give a file, e.g. {example}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option} {file!r}: the directory {str(path.parent)!r} does not exist")


def write_page(file: str, target: str, runs: Sequence[tuple[str, Prediction]], **sections: Any) -> None:
    """`sections`: findings, plan, measured, notes of a Page."""
    from oomph.report.html import Page, write_html

    cards = sorted(gpus.catalogue(), key=lambda card: card.memory)
    limits = [(card.title, card.memory, card.context) for card in cards]
    try:
        write_html(file, Page(target, runs, limits, **sections))
    except OSError as error:
        raise UserError(f"--html {file!r} cannot be written: {error.strerror or error}") from error
    print(f"oomph: the report is in {file}", file=sys.stderr)
