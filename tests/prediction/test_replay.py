"""Scripted events through the allocator: peaks, steps, what is alive, and what is refused."""

import pytest

from oomph.prediction.allocator import replay
from oomph.records import Allocation, Event, Moment, StepPeak

MIB = 1024 * 1024


def allocation(id, nbytes):
    stage, kind = "forward activations", "activation"
    return Allocation(id, nbytes, (nbytes,), "uint8", "aten.empty", "", None, stage, kind, step=1)


def workspace(id, nbytes):
    return allocation(id, nbytes)._replace(op="aten.convolution", kind="workspace")


def run(script, sizes, limit=None, record=False):
    """`+0` allocates id 0, `-0` frees it, `|2` begins step 2, any other word is a mark."""
    return replay(events(script), [allocation(i, n) for i, n in enumerate(sizes)], limit, record=record)


def events(script):
    made = []
    for word in script.split():
        if word[0] == "+":
            made.append(Event("alloc", int(word[1:])))
        elif word[0] == "-":
            made.append(Event("free", int(word[1:])))
        else:
            made.append(Event("mark", -1, f"step {word[1:]}" if word[0] == "|" else word))
    return made


def test_what_happens_before_the_first_step_is_not_in_the_peak():
    result = run("+0 +1 -1 |1 +2 -2", [10 * MIB, 90 * MIB, 20 * MIB])
    assert result.peak_allocated == 30 * MIB
    assert result.peak_reserved == 100 * MIB  # still reserved when the step begins
    assert result.highest_reserved == 100 * MIB
    assert (result.peak_event, result.peak_step) == (4, 1)


def test_where_the_first_mark_begins_step_2_step_1_is_all_before_it():
    result = run("+0 +1 -1 |2 +2 -2", [10 * MIB, 90 * MIB, 20 * MIB])
    assert [(step.step, step.allocated) for step in result.steps] == [(1, 100 * MIB), (2, 30 * MIB)]
    assert (result.peak_allocated, result.peak_event, result.peak_step) == (100 * MIB, 1, 1)


def test_every_step_has_its_own_peak_its_reserved_memory_and_its_end():
    result = run("+0 |1 +1 -1 |2 +2 +1 -2 |3", [10 * MIB, 20 * MIB, 40 * MIB])
    assert result.steps == (
        StepPeak(step=1, allocated=30 * MIB, reserved=30 * MIB, end=10 * MIB),
        StepPeak(step=2, allocated=70 * MIB, reserved=70 * MIB, end=30 * MIB),
        StepPeak(step=3, allocated=30 * MIB, reserved=70 * MIB, end=30 * MIB),
    )
    assert (result.peak_allocated, result.peak_step, result.peak_event) == (70 * MIB, 2, 6)


def test_the_highest_reserved_of_the_run_counts_what_was_released_before_the_first_step():
    result = run("+0 +1 -0 -1 +2 |1 -2", [40 * MIB, 40 * MIB, 50 * MIB], limit=100 * MIB)
    assert (result.peak_reserved, result.highest_reserved) == (50 * MIB, 80 * MIB)


def test_what_the_last_step_releases_to_stay_within_the_limit_is_counted():
    sizes = [40 * MIB, 40 * MIB, 90 * MIB]
    step = "+0 +1 -0 -1 +2 -2"
    assert run(f"|1 {step}", sizes, limit=100 * MIB).released == 2  # two segments, for the third
    assert run(f"|1 {step} |2 {step}", sizes, limit=100 * MIB).released == 0  # that one serves all three
    assert run(f"|1 {step}", sizes).released == 0
    assert run(f"|1 {step} |2", sizes, limit=100 * MIB).released == 2  # nothing happens after the last step
    assert run("|1 +0 -0 empty_cache", sizes, limit=100 * MIB).released == 0  # the program's own call


def test_emptying_the_cache_gives_back_what_is_free():
    assert run("+0 +1 -1 empty_cache +2", [30 * MIB] * 3).timeline[-1].reserved == 60 * MIB


def test_a_step_that_only_frees_peaks_at_its_own_mark():
    result = run("+0 +1 |1 -0 -1", [30 * MIB, 20 * MIB])
    assert (result.peak_allocated, result.peak_event) == (50 * MIB, 2)
    assert [alive.allocation.id for alive in result.at_peak] == [0, 1]


def test_the_alive_at_the_peak_come_largest_first_and_add_up_to_it():
    # 0 leaves 11 MiB of its segment; 1 gets all of it although it asks for 10.5.
    result = run("+0 +1 +2 +3 -2 +4", [9 * MIB, 10 * MIB + MIB // 2, 100, 0, 600_000])
    assert [(alive.bytes, alive.allocation.id) for alive in result.at_peak] == [
        (11 * MIB, 1),
        (9 * MIB, 0),
        (600_064, 4),
    ]
    assert sum(alive.bytes for alive in result.at_peak) == result.peak_allocated == 20 * MIB + 600_064


def test_the_timeline_has_a_moment_for_every_allocation_and_free():
    result = run("|1 +0 forward +1 -0", [30 * MIB, 5 * MIB])
    assert result.timeline == (
        Moment(1, 30 * MIB, 30 * MIB),
        Moment(3, 35 * MIB, 50 * MIB),
        Moment(4, 5 * MIB, 50 * MIB),
    )


def test_the_replay_stops_at_the_request_that_does_not_fit():
    result = run("+0 |1 +1 +2 -0 -1", [30 * MIB, 30 * MIB, 50 * MIB], limit=100 * MIB)
    assert result.refused == 2
    assert (result.peak_allocated, result.peak_reserved) == (60 * MIB, 60 * MIB)
    assert len(result.timeline) == 2
    assert result.steps == (StepPeak(step=1, allocated=60 * MIB, reserved=60 * MIB, end=60 * MIB),)


def test_a_run_that_fits_only_after_a_release_is_not_refused():
    result = run("+0 -0 +1", [60 * MIB, 80 * MIB], limit=100 * MIB, record=True)
    assert result.refused is None
    assert [(entry.action, entry.bytes, entry.id) for entry in result.trace] == [
        ("segment_alloc", 60 * MIB, 0),
        ("alloc", 60 * MIB, 0),
        ("free", 60 * MIB, 0),
        ("segment_free", 60 * MIB, 1),
        ("segment_alloc", 80 * MIB, 1),
        ("alloc", 80 * MIB, 1),
    ]


def test_the_trace_gives_the_freed_block_as_it_was_before_it_joined_its_neighbours():
    result = run("+0 +1 -1 -0", [6 * MIB, 6 * MIB], record=True)
    freed = [(entry.address, entry.bytes) for entry in result.trace if entry.action == "free"]
    taken = [(entry.address, entry.bytes) for entry in result.trace if entry.action == "alloc"]
    assert freed == taken[::-1]
    assert {size for _, size in freed} == {6 * MIB}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("+0 |1 -0 -0", "event 3: free of allocation 0, which is not alive"),
        ("+0 +1 +0", "event 2: alloc of allocation 0, which is alive"),
    ],
)
def test_contradictory_events_are_named_by_their_index(script, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        run(script, [1, 2])


def test_a_workspace_of_a_convolution_that_does_not_fit_is_left_out():
    """Measured: 33 passes of convolutions ran with 24 MiB beyond their results."""
    allocations = [allocation(0, 60 * MIB), workspace(1, 50 * MIB), allocation(2, 30 * MIB)]
    result = replay(events("|1 +0 +1 -1 +2"), allocations, 100 * MIB)
    assert (result.refused, result.smaller_workspaces, result.peak_allocated) == (None, True, 90 * MIB)
    enough = replay(events("|1 +0 +1 -1 +2"), allocations, 120 * MIB)
    assert (enough.smaller_workspaces, enough.peak_allocated) == (False, 110 * MIB)
    assert replay(events("|1 +0 +1 -1 +2"), allocations, 80 * MIB).refused == 2
