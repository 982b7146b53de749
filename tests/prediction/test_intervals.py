"""Intervals against programs that were measured on an H200 (benchmarks/results/intervals_h200.csv)."""

import pytest
from benchmarks import RESULTS
from benchmarks.accuracy.drawn import draw
from benchmarks.rows import stored

import oomph
from oomph.prediction.result import verdicts_at

ROWS = {(row["kind"], row["seed"], row["number"]): row for row in stored(RESULTS / "intervals_h200.csv")}


@pytest.mark.parametrize(
    "key",
    [
        ("convolution", "2", "16"),
        ("convolution", "1", "22"),
        ("data", "1", "7"),
    ],
    ids=" ".join,
)
def test_an_interval_holds_what_was_measured_and_decides_no_verdict_inside(key):
    kind, seed, number = key
    found, row = oomph.predict(draw(kind, int(seed), int(number))[1], gpu="h200"), ROWS[key]
    low, high = found.interval.low.allocated, found.interval.high.allocated
    assert low <= int(row["allocated"]) <= high
    inside, above = (low + high) // 2, 8 * found.interval.high.reserved
    assert verdicts_at(found, [inside])[0] != "fits"
    assert verdicts_at(found, [low // 2, above]) == ["does not fit", "fits"]
    assert verdicts_at(found, [int(row["fails_in"])])[0] != "fits"
