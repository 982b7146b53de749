"""The rows that the accuracy benchmark stores, and their bounds. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from benchmarks.rows import error_percent, read_json

ACCURACY = RESULTS / "accuracy.csv"


@dataclass(frozen=True)
class Comparison:
    """One workload, predicted and measured, in bytes. Errors are of the prediction, in percent."""

    workload: str
    gpu: str
    torch_measured: str
    torch_predicted: str
    measured_allocated: int
    predicted_allocated: int
    allocated_error_percent: float
    measured_reserved: int
    predicted_reserved: int
    reserved_error_percent: float
    seconds: float
    convolutions: bool


def compare_rows(
    measured: dict[str, Any], prediction: Any, torch_version: str, convolutions: bool
) -> Comparison:
    allocated, reserved = measured["peak"]["allocated"], measured["peak"]["reserved"]
    return Comparison(
        workload=measured["name"],
        gpu=measured["gpu"],
        torch_measured=measured["torch"],
        torch_predicted=torch_version,
        measured_allocated=allocated,
        predicted_allocated=prediction.peak.allocated,
        allocated_error_percent=error_percent(prediction.peak.allocated, allocated, 4),  # type: ignore[arg-type]
        measured_reserved=reserved,
        predicted_reserved=prediction.peak.reserved,
        reserved_error_percent=error_percent(prediction.peak.reserved, reserved, 4),  # type: ignore[arg-type]
        seconds=round(prediction.seconds, 2),
        convolutions=convolutions,
    )


def out_of_bounds(row: Comparison) -> list[str]:
    """Which of a row's errors leave the bounds that the README promises, in words."""
    found = []
    if abs(row.allocated_error_percent) > (3 if row.convolutions else 1.5):
        found.append(f"allocated is {row.allocated_error_percent:+.2f} % off")
    if not row.convolutions and row.allocated_error_percent < -1:
        found.append(f"allocated is {row.allocated_error_percent:+.2f} % too low")
    if abs(row.reserved_error_percent) > (15 if row.convolutions else 5):
        found.append(f"reserved is {row.reserved_error_percent:+.2f} % off")
    return found


def changes(row: Comparison, committed: Comparison) -> list[str]:
    """What differs from the committed row, if both were predicted with the same torch."""
    if row.torch_predicted != committed.torch_predicted:
        return []
    names = ("predicted_allocated", "predicted_reserved")
    pairs = {name: (getattr(committed, name), getattr(row, name)) for name in names}
    return [f"{name} was {old}, is {new}" for name, (old, new) in pairs.items() if old != new]


def measured_rows(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """{workload: row} of every file of measurements."""
    files = sorted(folder.glob("measured_*.json"))
    return {row["name"]: row for file in files for row in read_json(file)}
