from __future__ import annotations

from dataclasses import replace

from sample_prediction import CONTEXT, LOSS, GiB, MiB, allocation, prediction

from oomph.records import Growth, Peak
from oomph.report.verdict import tell_apart, verdict


def _peak(reserved: int, **changes) -> Peak:
    values = {"step": 2, "stage": "backward", "site": LOSS, **changes}
    return Peak(reserved, reserved, reserved + CONTEXT, **values)


def _on_a_card(capacity: int, reserved: int, fits: bool, **changes):
    values = {"capacity": capacity, "limit": capacity - CONTEXT, "peak": _peak(reserved), "refused": None}
    return prediction(fits=fits, **values, **changes)


def test_what_does_not_fit_says_need_card_and_place_of_the_peak():
    assert verdict(prediction()).line == (
        "does not fit: needs 31.5 GiB of the RTX 3090's 23.6 GiB; peak in backward of step 2, at loss.py:41"
    )


def test_the_refused_request_is_named_with_its_line_and_size():
    assert verdict(prediction()).refusal == (
        "the allocator would fail at loss.py:41 asking for 6.00 GiB, step 2"
    )


def test_a_refused_request_without_a_line_is_named_by_its_operator():
    refused = allocation(0, GiB, site=None, op="cublas workspace", step=0)
    assert verdict(prediction(refused=refused)).refusal == (
        "the allocator would fail in cublas workspace asking for 1.00 GiB"
    )


def test_what_fits_says_how_much_is_to_spare():
    assert verdict(_on_a_card(24 * GiB, 10 * GiB, True)).line == (
        "fits: needs 10.5 GiB of the RTX 3090's 24.0 GiB; 13.5 GiB to spare; "
        "peak in backward of step 2, at loss.py:41"
    )


def test_a_card_given_as_a_size_has_no_name():
    line = verdict(_on_a_card(24 * GiB, 30 * GiB, False, gpu="24GiB", gpu_title="24GiB card")).line
    assert line.startswith("does not fit: needs 30.5 GiB of 24.0 GiB; peak")


def test_without_a_limit_only_the_need_is_told():
    bare = prediction(gpu=None, gpu_title="", capacity=None, limit=None, fits=None, refused=None)
    assert verdict(bare).line == "needs 31.5 GiB; peak in backward of step 2, at loss.py:41"


def test_with_max_the_allocator_is_held_against_what_it_may_reserve():
    held = prediction(gpu=None, capacity=None, limit=40 * GiB, fits=True, refused=None)
    assert verdict(held).line.startswith("fits: needs 31.0 GiB of the 40.0 GiB allowed; 9.00 GiB to spare;")


def test_max_counts_even_when_a_larger_card_is_named():
    held = prediction(capacity=80 * GiB, limit=20 * GiB, fits=False, refused=None)
    assert verdict(held).line.startswith("does not fit: needs 31.0 GiB of the 20.0 GiB allowed;")


def test_max_counts_even_when_a_smaller_card_is_named():
    held = prediction(capacity=24 * GiB, limit=80 * GiB, fits=True, refused=None)
    assert verdict(held).line.startswith("fits: needs 31.0 GiB of the 80.0 GiB allowed; 49.0 GiB to spare;")


def test_fitting_only_by_returning_cached_memory_does_not_contradict_the_figures():
    line = verdict(_on_a_card(24 * GiB, 25 * GiB, True)).line
    assert line.startswith(
        "fits, but only by returning cached memory: would take 25.5 GiB of the RTX 3090's 24.0 GiB otherwise;"
    )
    assert "to spare" not in line


def test_failing_below_the_bound_is_explained_by_the_pieces_left():
    line = verdict(_on_a_card(24 * GiB, 23 * GiB, False)).line
    assert line.startswith(
        "does not fit: 23.5 GiB of the RTX 3090's 24.0 GiB would do, but not in the pieces left;"
    )


def test_sizes_that_would_print_alike_are_told_apart():
    assert tell_apart(31 * GiB, 31 * GiB + 20 * MiB) == ("31.00 GiB", "31.02 GiB")
    assert tell_apart(GiB, GiB + 1) == ("1,073,741,824 bytes", "1,073,741,825 bytes")
    assert tell_apart(GiB, GiB) == ("1.00 GiB", "1.00 GiB")


def test_a_hair_above_the_card_never_reads_as_equal():
    line = verdict(_on_a_card(24 * GiB, 24 * GiB - CONTEXT + 10 * MiB, False)).line
    assert "needs 24.01 GiB of the RTX 3090's 24.00 GiB" in line


def test_a_peak_before_the_first_step_says_so():
    early = prediction(peak=_peak(30 * GiB, step=0, stage="parameters", site=None), fits=None)
    assert verdict(early).line == "needs 30.5 GiB; peak in loading the model, before the first step"


def test_a_peak_of_unknown_stage_names_the_step_alone():
    unknown = prediction(peak=_peak(30 * GiB, stage=None, site=None), fits=None)
    assert verdict(unknown).line == "needs 30.5 GiB; peak in step 2"


def test_what_grows_with_every_step_is_part_of_the_line():
    held = replace(_on_a_card(24 * GiB, 10 * GiB, True), growth=Growth(100 * MiB, None))
    assert verdict(held).line.startswith("fits for now: needs 10.5 GiB of")
    assert verdict(held).line.endswith("; grows by 100 MiB with every step, out of memory after about 141")
    refused = replace(_on_a_card(24 * GiB, 30 * GiB, False), growth=Growth(100 * MiB, None))
    assert verdict(refused).line == verdict(replace(refused, growth=None)).line
