"""The rows that the accuracy benchmark stores, and their arithmetic. No torch here."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


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


def error_percent(predicted: int, measured: int) -> float:
    """Positive when the prediction is too high."""
    return round(100.0 * (predicted - measured) / measured, 4)


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
        allocated_error_percent=error_percent(prediction.peak.allocated, allocated),
        measured_reserved=reserved,
        predicted_reserved=prediction.peak.reserved,
        reserved_error_percent=error_percent(prediction.peak.reserved, reserved),
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


def short_name(gpu: str) -> str:
    """`h200` for "NVIDIA H200": what files of rows are called after."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")


def measured_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("measured_*.json"))


def read_measured(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_measured(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Through a second file, so that an interruption leaves the old rows whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partly = path.with_suffix(".partial")
    partly.write_text(json.dumps(list(rows), indent=1) + "\n", encoding="utf-8")
    partly.replace(path)


def read_comparisons(path: Path) -> list[Comparison]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [_comparison(row) for row in csv.DictReader(file)]


def _comparison(row: dict[str, str]) -> Comparison:
    make: dict[str, Any] = {"int": int, "float": float, "bool": lambda text: text == "True", "str": str}
    return Comparison(**{field.name: make[str(field.type)](row[field.name]) for field in fields(Comparison)})


def write_comparisons(path: Path, rows: Sequence[Comparison]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, fieldnames=[field.name for field in fields(Comparison)], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def table(rows: Sequence[Comparison]) -> str:
    """A Markdown table, then medians and worsts."""
    if not rows:
        return "no rows yet: run `python -m benchmarks.accuracy predict` first"
    lines = [
        "| workload | measured | predicted | error | reserved | predicted | error | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.workload} | {_gib(row.measured_allocated)} | {_gib(row.predicted_allocated)} | "
            f"{row.allocated_error_percent:+.2f} % | {_gib(row.measured_reserved)} | "
            f"{_gib(row.predicted_reserved)} | {row.reserved_error_percent:+.2f} % | {row.seconds:.1f} |"
        )
    lines.append("")
    for title, group in (
        ("without convolutions", [row for row in rows if not row.convolutions]),
        ("with convolutions", [row for row in rows if row.convolutions]),
        ("all", list(rows)),
    ):
        if group:
            lines.append(f"- {title} ({len(group)}): {_summary(group)}")
    return "\n".join(lines)


def _summary(rows: Sequence[Comparison]) -> str:
    allocated = [row.allocated_error_percent for row in rows]
    reserved = [row.reserved_error_percent for row in rows]
    return (
        f"allocated median {_median(allocated):.2f} %, worst {_worst(allocated):+.2f} %, "
        f"lowest {min(allocated):+.2f} %; "
        f"reserved median {_median(reserved):.2f} %, worst {_worst(reserved):+.2f} %"
    )


def _median(errors: Sequence[float]) -> float:
    return statistics.median(abs(error) for error in errors)


def _worst(errors: Sequence[float]) -> float:
    return max(errors, key=abs)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f} GiB"
