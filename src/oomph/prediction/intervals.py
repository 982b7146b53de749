"""How far what is needed may be from what is predicted, where something about a program is not known.

A program is traced, or replayed, as predicted, and with the least and the most of what is not known. An
interval reaches so far towards these two, and so far beside, that it holds the measured peaks of COVERAGE of
all programs. `python -m benchmarks.accuracy.intervals --calibrate` computes REACH from programs that were
drawn at random and measured, those of seeds 1 and 2 in benchmarks/results/intervals_h200.csv. It is judged
by those of seed 3, which were drawn after it was set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from oomph.records import SIZES_DEPEND_ON_VALUES, WORKSPACES_ESTIMATED, Interval, Peak

COVERAGE = 0.9
MOST = 3.0  # times the predicted peak, where sizes depend on values


class Reach(NamedTuple):
    down: float  # of the way to the least
    up: float  # of the way to the most
    beside: float  # of the peak, further in either direction
    limit: float = math.inf  # times the peak, for the most


# Of `allocated`, and of `reserved`.
REACH = {
    SIZES_DEPEND_ON_VALUES: (Reach(0.9, 0.1, 0.01, MOST), Reach(0.9, 0.2, 0.05, MOST)),
    WORKSPACES_ESTIMATED: (Reach(0.3, 1, 0.01), Reach(0, 0.5, 0.1)),
}


def calibrated(peak: Peak, others: Sequence[Peak], reason: str) -> Interval:
    """`others`: with the least and with the most of what is not known."""
    low, high = enclosing(peak, *others)
    of_allocated, of_reserved = REACH[reason]
    least, most = ends(low.allocated, peak.allocated, high.allocated, of_allocated)
    fewest, largest = ends(low.reserved, peak.reserved, high.reserved, of_reserved)
    context = peak.device - peak.reserved
    return Interval(
        replace(low, allocated=least, reserved=fewest, device=fewest + context),
        replace(high, allocated=most, reserved=largest, device=largest + context),
        reason,
    )


def ends(least: int, predicted: int, most: int, reach: Reach) -> tuple[int, int]:
    most, beside = int(min(most, reach.limit * predicted)), reach.beside * predicted
    down = reach.down * (predicted - least) + beside
    return int(predicted - down), int(predicted + reach.up * (most - predicted) + beside)


def enclosing(*peaks: Peak) -> list[Peak]:
    """The least and the most of each kind."""
    return [
        replace(
            choose(peaks, key=lambda peak: peak.allocated),
            reserved=choose(peak.reserved for peak in peaks),
            device=choose(peak.device for peak in peaks),
        )
        for choose in (min, max)
    ]
