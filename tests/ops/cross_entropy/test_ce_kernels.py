"""The kernels, in Triton's interpreter where there is no GPU: the same numbers as the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ce_cases import TINY, TOLERANCE, Inputs, assert_close, check, expected, inputs, numbers, run
from torch import nn

from oomph.ops import linear_cross_entropy

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU; see the gpu tests"),
    # NumPy, which the interpreter computes with, warns of NaN and infinity; kernels do not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

NAN = float("nan")
HALF = torch.float16  # the interpreter rounds bfloat16 towards zero, as no GPU does


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"reduction": "none", "through_lse": True},
        {"ignore_index": 0, "ignored": 0},
        {"label_smoothing": 0.1},
        {"z_loss": 0.2, "through_lse": True},
        {"softcap": 1.5},
        {"class_weight": numbers(13)},
        {"label_smoothing": 0.2, "class_weight": numbers(13), "softcap": 2.0},
        {"token_weight": numbers(2, 5, seed=3)},
        {"shift": True, "token_weight": numbers(2, 5, seed=3)},
        {"num_valid": 8, "label_smoothing": 0.1},
        {"num_valid": 8, "reduction": "none", "z_loss": 0.1, "through_lse": True},
    ],
    ids=str,
)
def test_the_options(options: dict[str, Any]) -> None:
    options = dict(options)
    case = inputs(2, 5, dtype=torch.float32, bias=True, ignored=options.pop("ignored", -100))
    check(case, impl="triton", **options)


EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.05, "softcap": 3.0, "through_lse": True}


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float32, "mean"), (HALF, "none")])
def test_everything_at_once_in_blocks_of_rows_and_of_classes(dtype: torch.dtype, reduction: str) -> None:
    case = inputs(19, v=200, dtype=dtype, bias=True)
    weights = {"class_weight": numbers(200), "token_weight": numbers(19)}
    check(case, impl="triton", memory_budget=TINY, reduction=reduction, num_valid=17, **weights, **EVERYTHING)


@pytest.mark.parametrize("v", [1, 127, 129, 1100])
def test_odd_numbers_of_classes(v: int) -> None:
    """1100: whole steps of four blocks, and a remainder."""
    check(inputs(3, v=v, d=3, dtype=torch.float32, ignored=None), impl="triton", label_smoothing=0.1)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"shift": True}),
        (HALF, {"num_valid": 17}),
        (HALF, {"shift": True}),
        (torch.bfloat16, {}),
    ],
)
def test_the_gradient_of_a_half_precision_weight_over_several_blocks_of_rows(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """There the targets' rows are added apart; many tokens share a target."""
    check(inputs(20, v=5, d=7, dtype=dtype), impl="triton", memory_budget=TINY, **options)


@pytest.mark.parametrize(("dtype", "num_valid"), [(torch.float32, None), (HALF, 17)])
def test_strides_do_not_matter(dtype: torch.dtype, num_valid: int | None) -> None:
    whole = inputs(20, dtype=dtype, bias=True)
    case = Inputs(
        x=whole.x.t().contiguous().t(),
        weight=whole.weight.t().contiguous().t(),
        target=whole.target.int().repeat_interleave(3)[::3],
        bias=whole.bias.repeat_interleave(2)[::2],
    )
    extra: dict[str, Any] = {"class_weight": numbers(26).float()[::2], "token_weight": numbers(1).expand(20)}
    check(case, impl="triton", label_smoothing=0.1, memory_budget=TINY, num_valid=num_valid, **extra)


@pytest.mark.parametrize(("dtype", "transposed"), [(torch.float32, False), (HALF, True)])
def test_accumulation_into_the_gradient(dtype: torch.dtype, transposed: bool) -> None:
    case = inputs(20, v=11, dtype=dtype, ignored=None)
    weight = nn.Parameter(case.weight.t().contiguous().t() if transposed else case.weight)
    for _ in range(2):
        loss = linear_cross_entropy(case.x, weight, case.target, impl="triton", accumulate_into_grad=True)
        loss.backward()
    once = expected(case).gradients[1] / numbers()
    assert_close([weight.grad], [2 * once], TOLERANCE[dtype])


@pytest.mark.parametrize("factor", [3.0, -2.0, 0.0])
def test_the_gradient_that_arrives_multiplies(factor: float) -> None:
    case = inputs(5, dtype=torch.float32, bias=True)
    x, weight = case.x.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = linear_cross_entropy(x, weight, case.target, bias=case.bias, impl="triton")
    first = torch.autograd.grad(loss * factor, (x, weight), retain_graph=True)
    second = torch.autograd.grad(loss * factor, (x, weight), retain_graph=True)
    exact = [each * factor / numbers() for each in expected(case).gradients[:2]]
    assert_close([*first, *second], [*exact, *exact], TOLERANCE[torch.float32])


@pytest.mark.parametrize("budget", [None, TINY])
def test_a_target_out_of_range_spoils_its_own_token_only(budget: int | None) -> None:
    case, wrong = inputs(8, v=200, dtype=HALF), torch.arange(8) > 2
    case.target[wrong] = torch.tensor([-1, 200, 1 << 31, (1 << 32) + 3, -(1 << 40)])
    options: dict[str, Any] = {"impl": "triton", "class_weight": numbers(200), "memory_budget": budget}
    ours = run(case, reduction="none", label_smoothing=0.1, **options)
    others = ~wrong
    assert ours.loss[wrong].isnan().all()
    assert ours.gradients[0][wrong].isnan().all()
    assert ours.loss[others].isfinite().all()
    assert ours.lse.isfinite().all()
    assert ours.gradients[0][others].isfinite().all()
    mean = run(case, **options)
    assert mean.loss.isnan()
    assert mean.gradients[1].isnan().any()


@pytest.mark.parametrize("budget", [None, TINY])
def test_nan_and_infinity_reach_the_loss_and_stay_in_their_token(budget: int | None) -> None:
    case, spoiled = inputs(6, v=200, dtype=torch.float32), torch.arange(6) % 3 == 2
    case.x[spoiled, 0] = torch.tensor([NAN, float("inf")])
    options: dict[str, Any] = {"impl": "triton", "memory_budget": budget}
    ours = run(case, reduction="none", **options)
    assert not ours.loss[spoiled].isfinite().any()
    assert ours.loss[~spoiled].isfinite().all()
    assert ours.gradients[0][~spoiled].isfinite().all()
    assert not run(case, **options).loss.isfinite()


@pytest.mark.parametrize("budget", [None, TINY])
def test_nan_in_an_ignored_token_counts_for_nothing(budget: int | None) -> None:
    case = inputs(6, v=200, dtype=torch.float32)
    options: dict[str, Any] = {"impl": "triton", "memory_budget": budget, "z_loss": 0.1}
    clean = run(case, **options)
    case.x[1] = NAN
    ours = run(case, **options)
    assert_close([ours.loss, ours.lse, ours.gradients[0]], [clean.loss, clean.lse, clean.gradients[0]], 1e-6)


def test_classes_at_minus_infinity_never_happen_even_where_a_whole_block_is() -> None:
    case = inputs(3, v=300, dtype=torch.float32, bias=True, ignored=None)
    case.bias[:128] = -float("inf")
    case = case.but(target=case.target.clamp(min=128))
    few = Inputs(case.x, case.weight[128:], case.target - 128, case.bias[128:])
    for budget in (None, TINY):
        ours, theirs = run(case, impl="triton", memory_budget=budget), expected(few)
        assert_close(
            [ours.loss, ours.lse, ours.gradients[0], ours.gradients[1][128:]],
            [theirs.loss, theirs.lse, *theirs.gradients[:2]],
            TOLERANCE[torch.float32],
        )


def test_empty_all_ignored_and_too_few_announced() -> None:
    empty = run(inputs(0, dtype=torch.float32), impl="triton", num_valid=0)
    ignored = run(inputs(4, dtype=torch.float32).but(target=torch.full((4,), -100)), impl="triton")
    assert all(not each.any() for each in (*empty.all, *ignored.all))
    for num_valid in (0, 1):
        assert run(inputs(4, dtype=torch.float32), impl="triton", num_valid=num_valid).loss.isnan()


def test_autocast_keeps_fp32_gradients() -> None:
    case = inputs(20, v=40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=HALF):
        ours = run(case, impl="triton", memory_budget=TINY)
    assert all(each.dtype == torch.float32 for each in ours.all)
    assert_close(ours.all, expected(case).all, TOLERANCE[HALF])
