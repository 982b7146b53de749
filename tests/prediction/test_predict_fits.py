"""Will it fit? Limits, cards, and the request that is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from predict_samples import linear_workload, stack_workload
from small_programs import MiB

import oomph
from oomph import UserError


def test_a_large_card_fits_and_nothing_is_refused(linear):
    assert linear.fits is True
    assert linear.refused is None
    assert linear.gpu == "h200"


def test_without_a_gpu_there_is_no_verdict():
    prediction = oomph.predict(linear_workload())
    assert (prediction.fits, prediction.limit, prediction.capacity, prediction.gpu) == (
        None,
        None,
        None,
        None,
    )


def test_a_limit_below_the_peak_refuses_a_request_and_names_it(stack):
    prediction = oomph.predict(stack_workload(), gpu="h200", max=stack.peak.allocated - 1)
    assert prediction.fits is False
    assert prediction.refused in prediction.allocations
    assert prediction.peak == stack.peak  # what it would need does not depend on what there is


def test_the_exact_reserved_peak_is_enough(stack):
    most = max(moment.reserved for moment in stack.timeline)
    assert oomph.predict(stack_workload(), max=most).fits is True


def test_cached_segments_are_released_before_a_request_is_refused():
    def train() -> Any:
        def step() -> None:
            for size in (40, 60, 80):  # each is free again before the next, and too small for it
                torch.empty(size * MiB, dtype=torch.uint8, device="cuda")

        return step

    prediction = oomph.predict(train, max="100MiB")
    assert prediction.peak.reserved == 180 * MiB
    assert prediction.peak.allocated == 80 * MiB
    assert prediction.fits is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "rtx9999"}, "rtx9999"),
        ({"gpu": "h200", "max": "24 potatoes"}, "24 potatoes"),
        ({"max": "0GiB"}, "0GiB"),
        ({"gpu": "24G"}, "24G"),
    ],
)
def test_a_wrong_gpu_or_size_is_the_users_mistake_and_is_quoted(options, message):
    with pytest.raises(UserError, match=message) as caught:
        oomph.predict(linear_workload(), **options)
    assert "\n" not in str(caught.value)


def test_a_size_works_as_a_gpu():
    assert oomph.predict(linear_workload(), gpu="24GiB").fits is True


def test_predicting_twice_gives_identical_numbers(stack):
    again = oomph.predict(stack_workload(), gpu="h200")
    assert again.peak == stack.peak
    assert again.events == stack.events
    assert again.allocations == stack.allocations
