"""The rows that the claims of the reports refer to: predicted and measured, in bytes and milliseconds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks import RESULTS as CORE_RESULTS
from benchmarks.rows import error_percent, stored

from lab.benchmarks import RESULTS

MiB = 2**20
PREDICTED = RESULTS / "systems_predicted.json"  # name -> field -> bytes, or milliseconds
OPS = {("attention", "B64 H8 N1024 D64"), ("cross_entropy", "32768x2560x151936")}
SEEDS = 3
Rows = dict[str, dict[str, dict[str, float]]]


def part_rows(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each field of each part."""
    rows = []
    for name, fields in measured.items():
        versions = {key: fields[key] for key in ("gpu", "torch")}
        for field, value in fields.items():
            guess = predicted.get(name, {}).get(field)
            if field not in versions:
                row = {"name": name, "field": field, "measured": value, "predicted": guess}
                rows.append(row | {"error_percent": error_percent(guess, value), **versions})
    return rows


def collect() -> Rows:
    rows: Rows = {}

    def add(name: str, kind: str, field: str, value: str | float | None, unit: float = 1) -> None:
        if value not in (None, ""):
            of_row = rows.setdefault(name, {"predicted": {}, "measured": {}})
            of_row[kind][field] = float(value) * unit  # type: ignore[arg-type]

    for name, fields in json.loads((RESULTS / PREDICTED.name).read_text()).items():
        for field, value in fields.items():
            add(name, "predicted", field, value)
    for row in stored(RESULTS / "systems.csv"):
        if not row["other_ms"]:
            add(row["name"], "measured", "peak", row["measured_mib"], MiB)
            add(row["name"], "measured", "ms", row["measured_ms"])
    for row in stored(RESULTS / "parts.csv"):
        add(row["name"], "measured", row["field"], row["measured"])
    for row in stored(CORE_RESULTS / "ops_h200.csv"):
        if (row["op"], row["shape"]) in OPS:
            add(f"op {row['op']} {row['contender']}", "measured", "peak", row["peak_mib"], MiB)
            add(f"op {row['op']} {row['contender']}", "measured", "ms", row["median_ms"])
    runs = stored(RESULTS / "training.csv")
    for row in runs:
        name = f"training {row['name']}"
        add(name, "measured", "peak", row["measured_mib"], MiB)
        add(name, "predicted", "peak", row["predicted_mib"], MiB)
        add(name, "measured", "tokens_per_second", row["tokens_per_second"])
        add(name, "measured", "psnr", row["psnr"])
    for name, values in seeds(runs, "psnr").items():
        add(f"training {name}, {SEEDS} seeds", "measured", "psnr", statistics.mean(values))
        add(f"training {name}, {SEEDS} seeds", "measured", "spread", max(values) - min(values))
    decoders: dict[str, list[float]] = {}  # in miniature, on the CPU
    for row in stored(RESULTS / "held_out.csv"):
        if row["run"].startswith("ginr_tiny ") and row["metric"] == "psnr":
            decoders.setdefault(row["run"], []).append(float(row["after"]))
    for name, values in decoders.items():
        add(f"training {name}", "predicted", "psnr", statistics.mean(values))
        add(f"training {name}", "predicted", "spread", max(values) - min(values))
    for row in stored(RESULTS / "stories.csv"):
        add(f"story {row['system']} {row['form']}", "predicted", "peak", row["needs_gib"], 2**30)
    for row in stored(CORE_RESULTS / "ranks_simulated.csv"):
        add(row["run"], "predicted", "peak", row["predicted_allocated"])
    for row in stored(RESULTS / "matmul.csv"):
        if row["dtype"] == "float32":
            shape = "x".join(row[key] for key in "mnk")
            add(f"matmul {shape} {row['method']}", "measured", "ms", row["median_ms"])
    return rows


def seeds(runs: list[dict[str, str]], field: str) -> dict[str, list[float]]:
    """Name of a run without its seed -> the values of its seeds, where there are SEEDS of them."""
    by_run: dict[str, list[float]] = {}
    for row in runs:
        name, comma, _ = row["name"].rpartition(", seed ")
        if comma and row[field]:
            by_run.setdefault(name, []).append(float(row[field]))
    return {name: values for name, values in by_run.items() if len(values) == SEEDS}
