"""The claims of the reports: how each figure is derived, and how it is read off the rows of results/."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.rows import stored

from lab.benchmarks.systems.figures import Rows, collect
from oomph_lab import systems
from oomph_lab.systems import SYSTEMS

CLAIMS = Path(systems.__file__).with_name("claims.csv")
VERDICTS = ("right", "wrong", "in part")
NO_FIGURE = "-"


class Figures:
    """The predicted or the measured rows: `f("updates 64", "saved")`, in bytes (or milliseconds, dB, ...).

    Raises KeyError where a row or a field is not known.
    """

    def __init__(self, kind: Literal["predicted", "measured"]) -> None:
        self.kind = kind

    def __call__(self, name: str, field: str = "peak") -> float:
        return stored_figures()[name][self.kind][field]

    def ratio(self, name: str, other: str, field: str = "peak") -> float:
        return self(name, field) / self(other, field)

    def slower(self, name: str, other: str) -> str:
        """The change in time: "+12 %"."""
        return f"{100 * (self.ratio(name, other, 'ms') - 1):+.0f} %"


class Claim(NamedTuple):
    """How the figures of a claim are computed; nothing in it is copied from the report.

    derive: by hand; None where claims.csv says it in words alone.
    figure: from rows, evaluated once on predicted and once on measured ones.
    measured_as: for the measured column instead, where other rows are measured than predicted.
    """

    derive: Callable[[], str] | None
    figure: Callable[[Figures], str]
    measured_as: Callable[[Figures], str] | None = None


def _text(figure: Callable[[Figures], str], kind: Literal["predicted", "measured"]) -> str:
    try:
        return figure(Figures(kind))
    except KeyError:
        return NO_FIGURE


@cache
def stored_figures() -> Rows:
    return collect()


def claim_rows() -> list[dict[str, str]]:
    """The rows of claims.csv with their figures computed again; its words are written by hand."""
    rows = stored(CLAIMS)
    for system in SYSTEMS.values():
        claims: dict[str, Claim] = import_module(f"lab.benchmarks.systems.claims_{system.name}").CLAIMS
        of_report = {row["claim"]: row for row in rows if row["report"] == system.report}
        for text in {**of_report, **claims}:
            row, claim = of_report[text], claims[text]
            if claim.derive is not None:
                row["derived"] = claim.derive()
            row["predicted"] = _text(claim.figure, "predicted")
            row["measured"] = _text(claim.measured_as or claim.figure, "measured")
    return rows


def gib(size: float) -> str:
    """Always two decimals, as in the reports: "222.56 GiB"."""
    return f"{size / 2**30:.2f} GiB"


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def gb(size: float) -> str:
    """1 GB is 10^9 bytes, for reports that use it."""
    return f"{size / 1e9:.2f} GB"


def mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def millions(count: float) -> str:
    return f"{count / 1e6:.1f}M"
