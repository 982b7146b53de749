"""The claims of the reports: how each figure is derived, and how it is read off the rows of results/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Literal

from benchmarks.systems.figures import Rows, collect
from oomph.systems import SYSTEMS

Verdict = Literal["right", "wrong", "in part"]
VERDICTS: tuple[Verdict, ...] = Verdict.__args__  # type: ignore[attr-defined]
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


@dataclass(frozen=True)
class Claim:
    """`derive` computes the figure and returns it as text; nothing in it is copied from the report.

    figure: the same figure from rows, evaluated once on predicted and once on measured ones.
    measured_as: for the measured column instead, where other rows are measured than predicted.
    """

    text: str  # the subject of the claim
    claimed: str
    derive: Callable[[], str]
    verdict: Verdict
    why: str
    figure: Callable[[Figures], str] | None = None
    measured_as: Callable[[Figures], str] | None = None

    def predicted(self) -> str:
        return _text(self.figure, Figures("predicted"))

    def measured(self) -> str:
        return _text(self.measured_as or self.figure, Figures("measured"))


def _text(figure: Callable[[Figures], str] | None, figures: Figures) -> str:
    if figure is None:
        return NO_FIGURE
    try:
        return figure(figures)
    except KeyError:
        return NO_FIGURE


@cache
def stored_figures() -> Rows:
    return collect()


def claim_rows() -> list[dict[str, str]]:
    """All claims as text, report by report."""
    return [
        {
            "report": system.report,
            "claim": claim.text,
            "claimed": claim.claimed,
            "derived": claim.derive(),
            "predicted": claim.predicted(),
            "measured": claim.measured(),
            "verdict": claim.verdict,
            "why": claim.why,
        }
        for system in SYSTEMS.values()
        for claim in import_module(f"benchmarks.systems.claims_{system.name}").CLAIMS
    ]


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
