"""Values that cannot be: targets out of range, NaN and infinity, a num_valid that is too small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ce_cases import TINY, Inputs, assert_close, inputs, numbers, run

from oomph.errors import ArgumentError
from oomph.ops import linear_cross_entropy

NAN, INF = float("nan"), float("inf")
WAYS: list[dict[str, Any]] = [
    {"impl": "plain"},
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=["plain", "one block", "small blocks"])
wrong_targets = pytest.mark.parametrize(
    "wrong", [-1, -99, 13, 14, 1 << 31, (1 << 32) + 3, -(1 << 40), (1 << 63) - 1]
)


def with_target(wrong: int) -> Inputs:
    case = inputs(20)
    case.target[3] = wrong
    return case


@every_way
@wrong_targets
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_target_out_of_range_makes_the_loss_and_its_gradients_nan(
    wrong: int, reduction: str, way: dict[str, Any]
) -> None:
    ours = run(with_target(wrong), reduction=reduction, class_weight=numbers(13), **way)
    assert ours.loss.isnan()
    assert ours.gradients[0][3].isnan().all()
    assert ours.gradients[1].isnan().any()


@every_way
@wrong_targets
@pytest.mark.parametrize("num_valid", [None, 15])
def test_per_token_only_the_token_with_the_wrong_target_is_nan(
    wrong: int, num_valid: int | None, way: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": 0.1, "num_valid": num_valid}
    ours = run(with_target(wrong), **options, **way)
    right = run(with_target(2), **options, **way)
    others = torch.arange(20) != 3
    assert ours.loss[3].isnan()
    assert ours.gradients[0][3].isnan().all()
    assert torch.equal(ours.loss[others], right.loss[others])
    assert torch.equal(ours.gradients[0][others], right.gradients[0][others])
    assert torch.equal(ours.lse, right.lse)


@wrong_targets
def test_check_names_the_wrong_target_and_the_valid_ones(wrong: int) -> None:
    case = with_target(wrong)
    message = rf"target {wrong} is out of range; valid: 0 to 12, or ignore_index=-100"
    for way in [*WAYS, {"impl": "auto"}, {"impl": "reference"}]:
        with pytest.raises(ArgumentError, match=message):
            linear_cross_entropy(case.x, case.weight, case.target, check=True, **way)


def test_check_lets_right_targets_pass_and_looks_at_no_target_that_shift_drops() -> None:
    case = inputs(20)
    case.target[0] = 99
    run(case, check=True, shift=True)
    with pytest.raises(ArgumentError, match="target 99 is out of range"):
        run(case, check=True)


def test_check_compares_num_valid_with_the_targets() -> None:
    with pytest.raises(ArgumentError, match="num_valid=12, but 13 targets are valid; give 13 or more"):
        run(inputs(20), check=True, num_valid=12)
    run(inputs(20), check=True, num_valid=13)


@every_way
@pytest.mark.parametrize("num_valid", [0, 1, 12])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_more_targets_are_kept_than_announced_the_loss_is_nan(
    num_valid: int, reduction: str, way: dict[str, Any]
) -> None:
    case = inputs(20)
    loss = linear_cross_entropy(
        case.x, case.weight, case.target, num_valid=num_valid, reduction=reduction, **way
    )
    assert loss.isnan()


@every_way
@pytest.mark.parametrize("num_valid", [1, 12])
def test_per_token_a_num_valid_that_is_too_small_is_seen_in_the_sum(
    num_valid: int, way: dict[str, Any]
) -> None:
    loss = run(inputs(20), num_valid=num_valid, reduction="none", **way).loss
    assert loss.sum().isnan()


@every_way
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["x", "weight", "bias"])
def test_nan_and_infinity_in_the_inputs_reach_the_loss(place: str, value: float, way: dict[str, Any]) -> None:
    case = inputs(20, v=200, bias=True)
    spoiled = getattr(case, place).clone()
    if place == "bias":
        spoiled[int(case.target[0])] = value
    else:
        spoiled[0, 0] = value
    ours = run(case.but(**{place: spoiled}), **way)
    assert not ours.loss.isfinite()
    # A target that cannot happen has an infinite loss with gradients like any other.
    assert ours.gradients[1].isfinite().all() == (place == "bias" and value == -INF)


@every_way
@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}, {"softcap": 2.0}], ids=str
)
def test_per_token_nan_stays_in_its_token(options: dict[str, Any], way: dict[str, Any]) -> None:
    case = inputs(20, v=200)
    case.x[3] = NAN
    assert case.target[3] != -100
    ours = run(case, reduction="none", through_lse=True, **options, **way)
    others = torch.arange(20) != 3
    assert ours.loss[3].isnan()
    assert ours.lse[3].isnan()
    assert ours.loss[others].isfinite().all()
    assert ours.gradients[0][others].isfinite().all()


# Not the plain way: there torch's own softmax decides, and gives NaN to the gradient of that token.
@pytest.mark.parametrize("way", WAYS[1:], ids=["one block", "small blocks"])
@pytest.mark.parametrize(
    "options", [{}, {"z_loss": 0.1}, {"label_smoothing": 0.1}, {"softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_in_an_ignored_token_reaches_neither_the_loss_nor_the_gradient_of_x(
    value: float, options: dict[str, Any], way: dict[str, Any]
) -> None:
    case = inputs(20, v=200)
    clean = run(case, **options, **way)
    assert case.target[1] == -100
    case.x[1] = value
    ours = run(case, through_lse=False, **options, **way)
    assert_close([ours.loss, ours.lse, ours.gradients[0]], [clean.loss, clean.lse, clean.gradients[0]], 1e-13)


@every_way
def test_ignored_tokens_dropped_by_num_valid_reach_no_gradient_at_all(way: dict[str, Any]) -> None:
    case = inputs(20, v=200)
    clean = run(case, num_valid=13, **way)
    case.x[case.target == -100] = NAN
    assert_close(run(case, num_valid=13, **way).all, clean.all, 1e-13)


@every_way
def test_a_class_at_minus_infinity_is_a_class_that_never_happens(way: dict[str, Any]) -> None:
    """A mask over classes, given as a bias."""
    case = inputs(20, v=200, bias=True)
    case.bias[150:] = -INF
    few = case.but(weight=case.weight[:150], bias=case.bias[:150], target=case.target.clamp(max=149))
    ours, theirs = run(case.but(target=few.target), **way), run(few, **way)
    assert_close(
        [ours.loss, ours.lse, ours.gradients[0]], [theirs.loss, theirs.lse, theirs.gradients[0]], 1e-13
    )
    assert_close([ours.gradients[1][:150]], [theirs.gradients[1]], 1e-13)
    assert not ours.gradients[1][150:].any()


@every_way
def test_large_logits_do_not_overflow(way: dict[str, Any]) -> None:
    case = inputs(20, dtype=torch.float32)
    case = case.but(x=case.x * 1e5)
    assert all(each.isfinite().all() for each in run(case, **way).all)
