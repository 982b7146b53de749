"""The margins of oomph.prediction.allocator from the residuals of `reserved`, class by class.

python -m benchmarks.accuracy.margins    # anywhere: reads accuracy.csv and capped_*.csv, writes margins.csv

A residual is measured over predicted, less one: positive where the prediction was too low. The margin of a
class covers at least 95 % of its residuals that are positive. Beyond it a program still runs, as a rule: at
its limit the allocator releases cached segments. That is what the capped runs (capped.py) check.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import RESULTS
from benchmarks.accuracy.rows import ACCURACY, Comparison
from benchmarks.rows import read, stored, write
from oomph.prediction.allocator import MARGINS


@dataclass(frozen=True)
class ClassOfPrograms:
    """Residuals and margin in percent of the predicted `reserved`."""

    name: str
    rows: int
    median: float  # of the residuals' absolute values
    too_low: float  # the largest residual: the prediction was too low by so much
    too_high: float
    most_too_low: float  # 95 % of the rows are too low by no more than this
    margin: float  # as oomph has it: no less than `most_too_low`
    capped_runs: int
    capped_failures: int


def residuals() -> Iterator[tuple[str, float]]:
    """(class, residual in percent) of every measured row."""
    for row in read(ACCURACY, Comparison):
        name = "convolutions" if row.convolutions else "plain"
        yield name, 100 * (row.measured_reserved / row.predicted_reserved - 1)
    for name, case in capped():
        if case["measured_reserved"] and case["change"]:  # the others are in accuracy.csv
            yield name, 100 * (int(case["measured_reserved"]) / int(case["predicted_reserved"]) - 1)


def capped() -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of capped.py, each with the class that decides its margin."""
    for path in sorted(RESULTS.glob("capped_*.csv")):
        for case in stored(path):
            yield max(case["classes"].split(", "), key=MARGINS.__getitem__), case


def derived() -> list[ClassOfPrograms]:
    found: dict[str, list[float]] = {name: [] for name in MARGINS}
    for name, residual in residuals():
        found[name].append(residual)
    runs = [(name, case["ran"]) for name, case in capped() if case["ran"]]
    rows = []
    for name, errors in found.items():
        ordered = sorted(errors) or [0.0]
        rows.append(
            ClassOfPrograms(
                name,
                len(errors),
                round(statistics.median(map(abs, ordered)), 4),
                round(ordered[-1], 4),
                round(ordered[0], 4),
                round(ordered[math.ceil(0.95 * len(ordered)) - 1], 4),
                100 * MARGINS[name],
                sum(each == name for each, _ in runs),
                sum(each == name and ran == "False" for each, ran in runs),
            )
        )
    return rows


def main() -> None:
    rows = derived()
    write(RESULTS / "margins.csv", rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
