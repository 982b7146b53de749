"""Shapes, strides and dtypes: what a model may hand over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ce_cases import TINY, TOLERANCE, assert_close, check, expected, inputs, numbers, run

from oomph.ops import linear_cross_entropy

WAYS: list[dict[str, Any]] = [
    {"impl": "plain"},
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
]
every_way = pytest.mark.parametrize("way", WAYS, ids=["plain", "one block", "small blocks"])


@every_way
@pytest.mark.parametrize("leading", [(), (1,), (3, 4), (2, 3, 5)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_any_leading_shape(leading: tuple[int, ...], reduction: str, way: dict[str, Any]) -> None:
    ours = check(inputs(*leading, ignored=None, bias=True), reduction=reduction, through_lse=True, **way)
    assert ours.loss.shape == (leading if reduction == "none" else ())
    assert ours.lse.shape == leading


@pytest.mark.parametrize(
    ("leading", "kept"), [((7,), (6,)), ((3, 4), (3, 3)), ((2, 1), (2, 0)), ((2, 0), (2, 0))]
)
@every_way
def test_shift_returns_one_position_less(
    leading: tuple[int, ...], kept: tuple[int, ...], way: dict[str, Any]
) -> None:
    ours = check(inputs(*leading), reduction="none", shift=True, **way)
    assert ours.loss.shape == ours.lse.shape == kept


@every_way
@pytest.mark.parametrize(
    ("n", "d", "v"), [(1, 1, 1), (3, 1, 127), (127, 3, 257), (257, 127, 3), (5, 257, 129), (3, 3, 1)]
)
def test_odd_shapes(n: int, d: int, v: int, way: dict[str, Any]) -> None:
    check(inputs(n, d=d, v=v, bias=True), through_lse=True, label_smoothing=0.1, **way)


@every_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_dtype(dtype: torch.dtype, reduction: str, way: dict[str, Any]) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    case = inputs(40, v=200, dtype=dtype, bias=True)
    options: dict[str, Any] = {
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "class_weight": numbers(200, dtype=dtype),
    }
    ours = check(case, reduction=reduction, through_lse=True, **options, **way)
    assert ours.loss.dtype == ours.lse.dtype == wide
    assert all(gradient is not None and gradient.dtype == dtype for gradient in ours.gradients)


@every_way
@pytest.mark.parametrize("options", [{}, {"num_valid": 15}, {"shift": True}], ids=str)
def test_strides_do_not_matter(options: dict[str, Any], way: dict[str, Any]) -> None:
    whole = inputs(20, bias=True)
    case = whole.but(
        x=whole.x.t().contiguous().t(),
        weight=torch.cat((whole.weight, whole.weight), 1)[:, : whole.weight.shape[1]],
        target=whole.target.repeat_interleave(2)[::2],
        bias=whole.bias.repeat_interleave(2)[::2],
    )
    extra = {"class_weight": numbers(26)[::2], "token_weight": numbers(1).expand(20), "label_smoothing": 0.1}
    assert not any(each.is_contiguous() for each in (case.x, case.weight, case.target, case.bias))
    same = check(case, **extra, **options, **way)
    assert_close(same.all, run(whole, **extra, **options, **way).all, 1e-13)


@every_way
def test_a_transposed_weight_and_a_batch_first_view_of_x(way: dict[str, Any]) -> None:
    whole = inputs(4, 5)
    case = whole.but(
        x=whole.x.transpose(0, 1).contiguous().transpose(0, 1), weight=whole.weight.t().contiguous().t()
    )
    check(case, through_lse=True, **way)


@every_way
def test_int32_targets(way: dict[str, Any]) -> None:
    case = inputs(4, 5)
    check(case.but(target=case.target.int()), shift=True, **way)


@every_way
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("leading", [(0,), (3, 0)])
def test_an_empty_batch_is_zero_with_zero_gradients(
    leading: tuple[int, ...], reduction: str, way: dict[str, Any]
) -> None:
    options = {"label_smoothing": 0.1, "class_weight": numbers(13)}
    for num_valid in (None, 0):
        ours = run(inputs(*leading, bias=True), reduction=reduction, num_valid=num_valid, **options, **way)
        assert ours.loss.shape == (leading if reduction == "none" else ())
        assert ours.gradients[0].shape == (*leading, 6)
        assert all(not each.any() for each in ours.all)


@every_way
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("num_valid", [None, 0, 2])
def test_where_all_targets_are_ignored_loss_and_gradients_are_zero(
    reduction: str, num_valid: int | None, way: dict[str, Any]
) -> None:
    case = inputs(5, bias=True).but(target=torch.full((5,), -100))
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.1, "class_weight": numbers(13)}
    ours = run(case, reduction=reduction, num_valid=num_valid, through_lse=True, **options, **way)
    assert all(not each.any() for each in ours.all)


@pytest.mark.parametrize("weights", [{"class_weight": torch.zeros(13)}, {"token_weight": torch.zeros(5)}])
@every_way
def test_a_mean_over_weights_of_zero_is_zero(weights: dict[str, Any], way: dict[str, Any]) -> None:
    ours = run(inputs(5), **weights, **way)
    assert all(not each.any() for each in (ours.loss, *ours.gradients[:2]))


def test_sizes_of_weights_need_not_be_those_of_the_inputs() -> None:
    """Weights per class and per token may be of any floating dtype."""
    case = inputs(20, dtype=torch.float32)
    for dtype in (torch.float64, torch.bfloat16):
        options = {"class_weight": numbers(13, dtype=dtype), "token_weight": numbers(20, dtype=dtype)}
        for way in WAYS:
            ours = run(case, **options, **way)
            assert_close(ours.all, expected(case, **options).all, TOLERANCE[torch.float32])


def test_no_result_depends_on_memory_outside_the_tensors() -> None:
    """x, weight and target lie between NaNs and impossible targets."""
    whole = inputs(20, ignored=None)

    def embedded(tensor: torch.Tensor, poison: float) -> torch.Tensor:
        larger = torch.full((tensor.shape[0] + 2, *(size + 2 for size in tensor.shape[1:])), poison).to(
            tensor
        )
        inside = larger[tuple(slice(1, -1) for _ in tensor.shape)]
        inside.copy_(tensor)
        return inside

    case = whole.but(
        x=embedded(whole.x, float("nan")),
        weight=embedded(whole.weight, float("nan")),
        target=embedded(whole.target, 1e9),
    )
    for way in WAYS:
        check(case, **way)


def test_the_loss_alone_comes_back_unless_the_log_sum_exp_is_asked_for() -> None:
    case = inputs(5)
    for way in WAYS:
        loss = linear_cross_entropy(case.x, case.weight, case.target, **way)
        both = linear_cross_entropy(case.x, case.weight, case.target, return_lse=True, **way)
        assert isinstance(loss, torch.Tensor)
        assert isinstance(both, tuple)
        assert torch.equal(both[0], loss)
