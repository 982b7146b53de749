"""A field report's claim beside what it comes to when it is worked out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["right", "wrong", "in part", "never measured"]
VERDICTS: tuple[Verdict, ...] = Verdict.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Claim:
    """`derive` works the figure out and says it in words; nothing in it is copied from the report."""

    report: str  # "002"
    text: str  # what the claim is about
    claimed: str
    derive: Callable[[], str]
    verdict: Verdict
    why: str


def gib(size: float) -> str:
    """Two decimals however large, since the reports give two: "222.56 GiB"."""
    return f"{size / 2**30:.2f} GiB"


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def gb(size: float) -> str:
    """Of 10^9 bytes, where a report counts so."""
    return f"{size / 1e9:.2f} GB"


def millions(count: float) -> str:
    return f"{count / 1e6:.1f}M"


def whole(value: object) -> int:
    """A number out of a case's REPORT, which holds words as well."""
    assert isinstance(value, int)
    return value
