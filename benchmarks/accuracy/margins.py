"""The margins of oomph.prediction.margin from the residuals of `reserved`, class by class.

python -m benchmarks.accuracy.margins    # anywhere: reads accuracy.csv and capped_*.csv, writes margins.csv

A residual is measured over predicted, less one: positive where the prediction was too low. The margin of a
class covers its largest positive residual, with half as much again because the rows are few.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from benchmarks import RESULTS
from benchmarks.accuracy.rows import read_comparisons
from oomph.prediction.margin import MARGINS

_SAFETY = 1.5


@dataclass(frozen=True)
class ClassOfPrograms:
    """Residuals and margin in percent of the predicted `reserved`."""

    name: str
    rows: int
    median: float  # of the residuals' absolute values
    too_low: float  # the largest residual: the prediction was too low by so much
    too_high: float
    covered: float  # the share of the rows whose residual is within the margin, either way
    needed: float  # the margin that follows from the residuals
    margin: float  # as oomph has it


def residuals() -> Iterator[tuple[str, float]]:
    """(class, residual in percent) of every measured row."""
    for row in read_comparisons(RESULTS / "accuracy.csv"):
        name = "convolutions" if row.convolutions else "plain"
        yield name, 100 * (row.measured_reserved / row.predicted_reserved - 1)
    for path in sorted(RESULTS.glob("capped_*.csv")):
        with path.open(newline="") as file:
            for case in csv.DictReader(file):
                if case["measured_reserved"] and case["change"]:  # the others are in accuracy.csv
                    measured, predicted = int(case["measured_reserved"]), int(case["predicted_reserved"])
                    widest = max(case["classes"].split(", "), key=MARGINS.__getitem__)
                    yield widest, 100 * (measured / predicted - 1)


def derived() -> list[ClassOfPrograms]:
    found: dict[str, list[float]] = {name: [] for name in MARGINS}
    for name, residual in residuals():
        found[name].append(residual)
    rows = []
    for name, errors in found.items():
        margin = 100 * MARGINS[name]
        if not errors:
            rows.append(ClassOfPrograms(name, 0, 0.0, 0.0, 0.0, 0.0, 0.0, margin))
            continue
        rows.append(
            ClassOfPrograms(
                name,
                len(errors),
                round(statistics.median(map(abs, errors)), 4),
                round(max(errors), 4),
                round(min(errors), 4),
                round(sum(abs(error) <= margin for error in errors) / len(errors), 3),
                round(_SAFETY * max(errors), 3),
                margin,
            )
        )
    return rows


def main() -> None:
    rows = derived()
    with (RESULTS / "margins.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(ClassOfPrograms)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
