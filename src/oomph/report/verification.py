"""What `oomph verify` found, for people and for programs."""

from __future__ import annotations

import math
from typing import Any

from oomph.records import Verification

_SHOWN = 8


def verification_text(found: Verification) -> str:
    names = ", ".join(found.fixes)
    if found.tolerance is None:
        verdict = f"{names}: changes the numbers on purpose ({found.kind}); not judged"
    elif found.holds:
        verdict = f"{names}: the same loss, gradients and parameters, within {found.tolerance:g}"
    else:
        verdict = f"{names}: NOT the same; exact fixes may differ by {found.tolerance:g} at most"
    count = len(found.differences)
    lines = [verdict, "", f"  {count} tensors compared; furthest apart, by their largest entry:"]
    lines += [f"  {each.error:9.2e}  {each.name}" for each in found.differences[:_SHOWN]]
    return "\n".join(lines) + "\n"


def verification_to_json(found: Verification) -> dict[str, Any]:
    """An error of null is one beyond all numbers: something is missing, of another shape, or not a number."""
    return {
        "schema": 1,
        "holds": found.holds,
        "fixes": list(found.fixes),
        "kind": found.kind,
        "tolerance": found.tolerance,
        "differences": [
            {"name": each.name, "error": each.error if math.isfinite(each.error) else None}
            for each in found.differences
        ],
    }
