from __future__ import annotations

from oomph.records import Event, Moment
from oomph.report.chart import ASCII, UNICODE, area, bar, columns, row_of, step_columns


def test_the_largest_bar_fills_the_width_and_the_smallest_is_still_seen():
    assert bar(100, 100, 10, ASCII) == "#" * 10
    assert bar(1, 10**9, 10, ASCII) == "#"
    assert bar(1, 10**9, 10, UNICODE) == "▏"
    assert bar(0, 100, 10, ASCII) == ""


def test_unicode_bars_resolve_an_eighth_of_a_cell():
    assert bar(3, 8, 1, UNICODE) == "▍"
    assert bar(12, 16, 2, UNICODE) == "█▌"


def test_a_column_shows_the_highest_moment_of_its_stretch():
    timeline = [Moment(0, 1, 0), Moment(1, 9, 0), Moment(2, 2, 0), Moment(3, 3, 0)]
    assert columns(timeline, 4, 2) == [9, 3]


def test_a_stretch_without_a_moment_stays_where_the_one_before_ended():
    timeline = [Moment(0, 9, 0), Moment(1, 4, 0), Moment(7, 6, 0)]
    assert columns(timeline, 8, 4) == [9, 4, 4, 6]


def test_the_area_fills_from_below():
    assert area([0, 2, 4], 4, 2, ASCII) == ["  #", " ##"]
    assert area([4, 0], 4, 1, UNICODE) == ["█ "]


def test_the_step_marks_are_found_in_the_events():
    events = [Event("mark", -1, "step 1"), Event("alloc", 0), Event("mark", -1, "step 2"), Event("free", 0)]
    assert step_columns(events, 8) == [(0, "step 1"), (4, "step 2")]


def test_a_line_at_the_top_runs_through_the_first_row_and_at_zero_through_the_last():
    assert row_of(100, 100, 8) == 0
    assert row_of(0, 100, 8) == 7
    assert row_of(50, 100, 8) == 3
