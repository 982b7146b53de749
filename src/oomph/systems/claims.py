"""A claim of a field report, and the figure that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["right", "wrong", "in part", "never measured"]
VERDICTS: tuple[Verdict, ...] = Verdict.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ReportedRun:
    """The run that failed, as the report gives it. preset: of the system's config."""

    gpu: str
    preset: str
    batch: int
    tokens: int


@dataclass(frozen=True)
class Claim:
    """`derive` computes the figure and returns it as text; nothing in it is copied from the report."""

    text: str  # the subject of the claim
    claimed: str
    derive: Callable[[], str]
    verdict: Verdict
    why: str


def gib(size: float) -> str:
    """Always two decimals, as in the reports: "222.56 GiB"."""
    return f"{size / 2**30:.2f} GiB"


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def gb(size: float) -> str:
    """1 GB is 10^9 bytes, for reports that use it."""
    return f"{size / 1e9:.2f} GB"


def millions(count: float) -> str:
    return f"{count / 1e6:.1f}M"
