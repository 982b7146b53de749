"""`oomph compare`: two files that predictions and runs have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oomph import units
from oomph.cli.common import Html, Json, check_output_file, write_json, write_page, write_stdout
from oomph.errors import ExitStatus, UserError
from oomph.records import Prediction
from oomph.report.as_json import prediction_from_json
from oomph.report.comparison import comparison_text, comparison_to_json
from oomph.report.recording import is_pickle, read_snapshot
from oomph.report.terminal import printable, report_console

_MOST_BYTES = 2**30  # of a file


def run_compare(
    before: Annotated[
        str, typer.Argument(metavar="OLD", help="The output of `oomph predict --json`, or a memory snapshot.")
    ],
    after: Annotated[str, typer.Argument(metavar="NEW", help="Likewise.")],
    tolerance: Annotated[
        str, typer.Option(metavar="SIZE|PERCENT", help="Growth up to which the exit status is 0.")
    ] = "1%",
    as_json: Json = False,
    html: Html = None,
) -> int:
    """Compare two predictions: what grew, and at which line. Exit status 1 if the new one needs more."""
    check_output_file("--html", html, "report.html")
    old, new = read_prediction(before), read_prediction(after)
    most = old.peak.reserved + _growth_allowed(tolerance, old.peak.reserved)
    if as_json:
        write_json(comparison_to_json(old, new))
    else:
        write_stdout(comparison_text(old, new, report_console()))
    if html is not None:
        titles = [Path(file).name for file in (before, after)]
        if titles[0] == titles[1]:
            titles = ["before", "after"]
        write_page(html, f"{before} and {after}", [(titles[0], old), (titles[1], new)])
    return ExitStatus.FITS if new.peak.reserved <= most else ExitStatus.DOES_NOT_FIT


def _growth_allowed(text: str, size: int) -> int:
    if not text.endswith("%"):
        return units.parse_bytes(text)
    try:
        share = float(text[:-1]) / 100
    except ValueError:
        share = -1
    if not 0 <= share < float("inf"):
        raise UserError(f"--tolerance {text!r} is not valid; give a size or a percentage, e.g. 100MiB or 1%")
    return int(share * size)


def read_prediction(file: str) -> Prediction:
    """The file of `oomph predict --json`, or a memory snapshot of PyTorch."""
    return prediction_of(read_file(file), file)


def prediction_of(data: bytes, file: str) -> Prediction:
    if is_pickle(data):
        return read_snapshot(data, file)
    try:
        return prediction_from_json(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"it has no key {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
            what = "it is not JSON"
        raise UserError(
            f"{file} is not the output of `oomph predict --json` or a memory snapshot: {printable(what, 120)}"
        ) from error


def read_file(file: str) -> bytes:
    path = Path(file)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{file} has {units.format_bytes(path.stat().st_size)}; at most 1 GiB is read")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
