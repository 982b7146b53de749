"""kill -9, also while a checkpoint is being written: the run that is resumed ends as if nothing had been."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_four_kills_at_random_moments_change_nothing_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "kills.csv"
    command = [
        sys.executable,
        "-m",
        "benchmarks.training.kills",
        "--kills",
        "4",
        "--per-run",
        "4",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert all(row["equal"] == "True" for row in rows)
    assert all(0 <= int(row["resumed_at"]) <= int(row["killed_at"]) for row in rows)
    # Saved at every step or every other: what is lost is what was being written, and the steps since.
    assert all(int(row["killed_at"]) - int(row["resumed_at"]) <= 4 for row in rows)
