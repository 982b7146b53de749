"""A field report as data: what failed, its commands and forms, and its claims beside our figures.

Nothing here predicts or measures. `oomph systems NAME` predicts the forms; figures.json holds the rows of
benchmarks/results that the claims refer to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Verdict = Literal["right", "wrong", "in part", "never measured"]
VERDICTS: tuple[Verdict, ...] = Verdict.__args__  # type: ignore[attr-defined]
NO_FIGURE = "-"


@dataclass(frozen=True)
class ReportedRun:
    """The run that failed, as the report gives it. preset: of the system's config."""

    gpu: str
    preset: str
    batch: int
    tokens: int


@dataclass(frozen=True)
class FormRun:
    """A form of the system at the report's shape: `oomph predict configs/CONFIG.yaml OVERRIDES --gpu GPU`."""

    what: str
    config: str
    overrides: tuple[str, ...] = ()

    def command(self, gpu: str) -> str:
        return " ".join(["oomph predict", f"configs/{self.config}.yaml", *self.overrides, "--gpu", gpu])


@dataclass(frozen=True)
class Report:
    """failed: what ran out of memory, where. commands: the report's own -> the one that does it here."""

    failed: str
    gpu: str
    commands: Mapping[str, str]
    forms: tuple[FormRun, ...]


class Figures:
    """The predicted or the measured rows: `f("updates 64", "saved")`, in bytes (or milliseconds, dB, ...).

    Raises KeyError where a row or a field is not known.
    """

    def __init__(self, kind: Literal["predicted", "measured"]) -> None:
        self.kind = kind
        self.on_cpu = False  # whether a row was used that has real tensors, and no GPU

    def __call__(self, name: str, field: str = "peak") -> float:
        row = stored_figures()[name]
        if self.kind == "measured" and field not in row["measured"]:
            self.on_cpu = True
            return row["on_cpu"][field]
        return row[self.kind][field]

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
        text = figure(figures)
    except KeyError:
        return NO_FIGURE
    return f"{text} (real tensors on the CPU)" if figures.on_cpu else text


@cache
def stored_figures() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Row -> "predicted" and "measured" -> field -> value. See benchmarks/systems."""
    found: Mapping[str, Mapping[str, Mapping[str, float]]] = json.loads(
        files("oomph.systems").joinpath("figures.json").read_text()
    )
    return found


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
