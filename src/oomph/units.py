"""Sizes and counts: exact numbers inside, words for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import ROUND_FLOOR, Decimal
from typing import Literal

from oomph.errors import ArgumentError, UserError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

_UNITS = {
    "B": 1,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "TiB": TiB,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BY_LOWER_CASE = {unit.lower(): size for unit, size in _UNITS.items()}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")
_VALID = (
    "a size is a number with a unit, B KiB MiB GiB TiB (powers of 1024) or KB MB GB TB (powers of 1000), "
    "e.g. 24GiB"
)
# Beyond every machine; a larger number is a slip of the keyboard, and would only overflow a display.
_LARGEST = 1 << 60


def parse_bytes(text: str | int) -> int:
    """The bytes that `text` stands for: "24GiB", "1.5 gib", "80GB"; an int is a number of bytes.

    Fractions of a byte are dropped. Zero and negative sizes are refused.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ArgumentError(f"size {text!r} is not valid; {_VALID}")
    given = f"{text:#x}" if isinstance(text, int) and abs(text) > _LARGEST else str(text).strip()
    match = _SIZE.fullmatch(given)
    if match is None:
        raise ArgumentError(f"size {_shown(given)} is not valid; {_VALID}")
    number, unit = match.groups()
    if not unit and isinstance(text, str):
        raise ArgumentError(f"size {_shown(given)} has no unit; {_VALID}")
    if unit.lower() in ("k", "m", "g", "t"):
        letter = unit.upper()
        raise ArgumentError(
            f"size {_shown(given)} is ambiguous; write {number}{letter}iB (powers of 1024) "
            f"or {number}{letter}B (powers of 1000)"
        )
    factor = _BY_LOWER_CASE.get(unit.lower() or "b")
    if factor is None:
        raise ArgumentError(f"size {_shown(given)} has an unknown unit, {_shown(unit)}; {_VALID}")
    # Decimal, because 0.1 GiB is not exact in binary and a budget must not move with the float format.
    size = (Decimal(number) * factor).to_integral_value(ROUND_FLOOR)
    if size < 1:
        raise ArgumentError(f"size {_shown(given)} is less than one byte; {_VALID}")
    if size > _LARGEST:
        raise ArgumentError(f"size {_shown(given)} is larger than any machine (2**60 bytes); {_VALID}")
    return int(size)


def format_bytes(size: int) -> str:
    """`size` for people: "31.4 GiB", "8.39 GiB", "751 MiB", "512 B". Differences may be negative."""
    sign, rest = ("-", -size) if size < 0 else ("", size)
    if rest < KiB:
        return f"{sign}{rest} B"
    # Compared after rounding, so that a byte less than 1 GiB is not "1024 MiB".
    for unit, name in ((KiB, "KiB"), (MiB, "MiB")):
        value = rest / unit
        decimals = 1 if value < 9.95 else 0
        if round(value, decimals) < 1024:
            return f"{sign}{value:.{decimals}f} {name}"
    # GiB keep a decimal, because a tenth of one is often what decides whether a step fits.
    value = rest / GiB
    return f"{sign}{value:.{2 if value < 9.995 else 1}f} GiB"


def counted(number: int, noun: str) -> str:
    """A number with its noun, one that takes an s: "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shown(given: str) -> str:
    """The user's own text, cut short so that an error stays one line."""
    return repr(given if len(given) <= 40 else given[:37] + "...")


BATCH_SIZES = ("B", "T", "H", "W")


def check_batch_sizes(sizes: Mapping[str, int] | Literal["longest"]) -> None:
    """Raise for sizes that `--sizes` of a script or function does not take."""
    if sizes == "longest":
        return
    wrong = {
        name: size
        for name, size in sizes.items()
        if not (name in BATCH_SIZES or name.isdecimal())
        or isinstance(size, bool)
        or not isinstance(size, int)
        or size < 1
    }
    if wrong or not sizes:
        raise UserError(
            f"sizes={dict(sizes)!r} is not valid for a script or function; give whole numbers for "
            f"{', '.join(BATCH_SIZES)}, as T=4096, or for a size that it has, as 512=4096, or 'longest'"
        )
