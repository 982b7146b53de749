"""The rows that the claims of the reports refer to: predicted and measured, in bytes and milliseconds."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

from benchmarks import RESULTS
from oomph.systems import SYSTEMS

MiB = 2**20
SEEDS = 3
Rows = dict[str, dict[str, dict[str, float]]]


def rows_of(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def collect(results: Path = RESULTS) -> Rows:
    found: Rows = {}

    def add(name: str, kind: str, field: str, value: str | float | None, unit: float = 1) -> None:
        if value not in (None, ""):
            of_row = found.setdefault(name, {"predicted": {}, "measured": {}})
            of_row[kind][field] = round(float(value) * unit, 3)  # type: ignore[arg-type]

    for row in rows_of(results / "systems.csv"):
        if not row["other_ms"]:
            for kind in ("predicted", "measured"):
                add(row["name"], kind, "peak", row[f"{kind}_mib"], MiB)
                add(row["name"], kind, "ms", row.get(f"{kind}_ms"))
    for row in rows_of(results / "parts.csv"):
        for kind in ("predicted", "measured"):
            add(row["name"], kind, row["field"], row[kind])
    runs = rows_of(results / "training.csv")
    for row in runs:
        name = f"training {row['name']}"
        add(name, "measured", "peak", row["measured_mib"], MiB)
        add(name, "predicted", "peak", row["predicted_mib"], MiB)
        add(name, "measured", "tokens_per_second", row["tokens_per_second"])
        add(name, "measured", "psnr", row["psnr"])
    for name, values in seeds(runs, "psnr").items():
        add(f"training {name}, {SEEDS} seeds", "measured", "psnr", statistics.mean(values))
        add(f"training {name}, {SEEDS} seeds", "measured", "spread", max(values) - min(values))
    for row in rows_of(results / "matmul.csv"):
        if row["dtype"] == "float32":
            shape = "x".join(row[key] for key in "mnk")
            add(f"matmul {shape} {row['method']}", "measured", "ms", row["median_ms"])
    return found


def seeds(runs: list[dict[str, str]], field: str) -> dict[str, list[float]]:
    """Name of a run without its seed -> the values of its seeds, where there are SEEDS of them."""
    found: dict[str, list[float]] = {}
    for row in runs:
        name, comma, _ = row["name"].rpartition(", seed ")
        if comma and row[field]:
            found.setdefault(name, []).append(float(row[field]))
    return {name: values for name, values in found.items() if len(values) == SEEDS}


def claim_rows() -> list[dict[str, Any]]:
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
        for claim in system.claims
    ]
