"""Thinned timelines keep what they are drawn for: their maxima."""

from __future__ import annotations

import random

import pytest

from oomph.records import Moment
from oomph.report.thinning import thin


def long_timeline(seed: int) -> tuple[Moment, ...]:
    """A random walk of allocated bytes; what is reserved stands somewhat above it, for a while."""
    chance = random.Random(seed)
    allocated, moments = 0, []
    for event in range(5000):
        allocated = max(0, allocated + chance.randint(-100, 110))
        moments.append(Moment(event, allocated, allocated + chance.randint(0, 500)))
    return tuple(moments)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("points", [1, 2, 7, 50])
def test_a_thinned_timeline_is_short_ordered_and_keeps_both_maxima(points: int, seed: int) -> None:
    timeline = long_timeline(seed)
    thinned = thin(timeline, points)
    assert 1 <= len(thinned) <= points
    assert list(thinned) == sorted(thinned)
    assert set(thinned) <= set(timeline)
    assert max(m.allocated for m in thinned) == max(m.allocated for m in timeline)
    if points > 1:
        assert max(m.reserved for m in thinned) == max(m.reserved for m in timeline)


def test_every_stretch_has_a_point() -> None:
    timeline = tuple(Moment(event, event % 10, 0) for event in range(1000))
    assert [moment.event // 100 for moment in thin(timeline, 10)] == list(range(10))


def test_a_short_timeline_is_not_thinned() -> None:
    timeline = (Moment(0, 512, 4096), Moment(1, 0, 4096))
    assert thin(timeline, 2) == timeline
    assert thin((), 5) == ()


def test_a_timeline_of_no_points_is_an_error() -> None:
    with pytest.raises(ValueError, match="give 1 or more"):
        thin((), 0)
