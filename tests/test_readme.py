"""The README's commands run, and its tables are those of the committed rows."""

from __future__ import annotations

import csv
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^\$ (oomph .*?)(?:\s+#.*)?$", README, flags=re.MULTILINE)


def test_the_readme_shows_commands_and_a_picture() -> None:
    assert len(COMMANDS) >= 2
    for file in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_gives_an_answer(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.strip()


def test_every_figure_of_the_accuracy_table_is_a_committed_row() -> None:
    with (ROOT / "benchmarks/results/accuracy.csv").open() as file:
        rows = {row["workload"]: row for row in csv.DictReader(file)}
    shown = re.findall(
        r"^\| `([\w.-]+)`[^|]*\| ([\d.]+) GiB \| ([-+][\d.]+) % \| ([-+][\d.]+) % \|$", README, re.M
    )
    assert len(shown) >= 10
    for name, measured, allocated, reserved in shown:
        row = rows[name]
        assert f"{int(row['measured_allocated']) / 2**30:.2f}" == measured, name
        assert f"{float(row['allocated_error_percent']):+.2f}" == allocated, name
        assert f"{float(row['reserved_error_percent']):+.2f}" == reserved, name


def test_every_figure_of_the_speed_table_is_a_committed_row() -> None:
    with (ROOT / "benchmarks/results/speed.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert f"| {float(row['seconds']):.1f} s | {row['host_gib']} GiB |" in README, row["case"]


def test_the_tables_of_the_ops_are_those_of_the_committed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("readme_tables")
    assert tables.losses() in README
    assert tables.other_ops() in README
