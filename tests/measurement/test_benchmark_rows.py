"""The rows of the accuracy benchmark: stored, compared and shown."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_rows", BENCHMARKS / "rows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def prediction(allocated: int, reserved: int) -> SimpleNamespace:
    return SimpleNamespace(peak=SimpleNamespace(allocated=allocated, reserved=reserved), seconds=1.234)


MEASURED = {"name": "a", "gpu": "a card", "torch": "2.11.0", "peak": {"allocated": 1000, "reserved": 2000}}


def test_the_error_is_positive_when_the_prediction_is_too_high(rows: ModuleType) -> None:
    row = rows.compare_rows(MEASURED, prediction(1010, 1900), "2.13.0", False)
    assert (row.allocated_error_percent, row.reserved_error_percent) == (1.0, -5.0)


def test_comparisons_survive_being_written_and_read(rows: ModuleType, tmp_path: Path) -> None:
    row = rows.compare_rows(MEASURED, prediction(1010, 1900), "2.13.0", True)
    rows.write_comparisons(tmp_path / "accuracy.csv", [row])
    assert rows.read_comparisons(tmp_path / "accuracy.csv") == [row]


def test_the_table_ends_with_medians_and_the_worst_of_either_sign(rows: ModuleType) -> None:
    made = [
        rows.compare_rows(MEASURED, prediction(allocated, 2000), "2.13.0", convolutions)
        for allocated, convolutions in ((1001, False), (980, False), (1002, False), (1030, True))
    ]
    last = rows.table(made).splitlines()[-3:]
    assert last[0].startswith("- without convolutions (3): allocated median 0.20 %, worst -2.00 %")
    assert last[1].startswith("- with convolutions (1): allocated median 3.00 %, worst +3.00 %")
    assert last[2].startswith("- all (4): ")


def test_every_stored_measurement_has_what_the_comparison_reads(rows: ModuleType) -> None:
    stored = [row for path in rows.measured_files(BENCHMARKS / "results") for row in rows.read_measured(path)]
    assert len(stored) >= 8
    for row in stored:
        assert row["name"]
        assert row["gpu"]
        assert row["torch"]
        assert row["peak"]["allocated"] == max(step["allocated"] for step in row["steps"])
        assert 0 < row["peak"]["allocated"] <= row["peak"]["reserved"] < row["peak"]["device"]
