"""Every option, alone and with others, in every implementation, against the specification in float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ce_cases import TINY, assert_close, check, expected, inputs, numbers, run

LEADING, CLASSES = (4, 5), 13
ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignore a valid class": {"ignore_index": 0},
    "label smoothing": {"label_smoothing": 0.1},
    "all smoothing": {"label_smoothing": 1.0},
    "z-loss": {"z_loss": 0.2},
    "softcap": {"softcap": 1.5},
    "class weight": {"class_weight": numbers(CLASSES)},
    "token weight": {"token_weight": numbers(*LEADING, seed=3)},
    "shift": {"shift": True},
    "num_valid": {"num_valid": 17},
}
# "chunked" in one block, and in the smallest blocks.
WAYS: list[dict[str, Any]] = [
    {"impl": "plain"},
    {"impl": "chunked"},
    {"impl": "chunked", "memory_budget": TINY},
]
WAY_NAMES = ["plain", "one block", "small blocks"]


def valid_with(options: dict[str, Any]) -> dict[str, Any]:
    """Targets of 20 tokens, every third ignored: 13 are kept, 17 is more than enough; as with shift."""
    return {"ignored": options.get("ignore_index", -100)}


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("through_lse", [False, True], ids=["loss", "loss and lse"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", ALONE)
def test_an_option_alone(name: str, bias: bool, through_lse: bool, way: dict[str, Any]) -> None:
    options = ALONE[name]
    check(inputs(*LEADING, bias=bias, **valid_with(options)), through_lse=through_lse, **options, **way)


def combination(seed: int) -> dict[str, Any]:
    """Each option with probability one half."""
    chance = random.Random(seed)
    names = [name for name in ALONE if name not in ("nothing", "sum", "none", "all smoothing")]
    chosen: dict[str, Any] = {"reduction": chance.choice(("mean", "sum", "none"))}
    for name in names:
        chosen |= ALONE[name] if chance.random() < 0.5 else {}
    return chosen


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("seed", range(30))
def test_options_together(seed: int, way: dict[str, Any]) -> None:
    options = combination(seed)
    case = inputs(*LEADING, bias=seed % 2 == 0, seed=seed, **valid_with(options))
    check(case, through_lse=seed % 3 == 0, **options, **way)


@pytest.mark.parametrize("seed", range(12))
def test_options_together_in_blocks_of_rows_and_of_classes(seed: int) -> None:
    """37 tokens by 300 classes in the smallest blocks: five of rows by three of classes."""
    options = combination(seed)
    if "class_weight" in options:
        options["class_weight"] = numbers(300)
    if "token_weight" in options:
        options["token_weight"] = numbers(37)
    if "num_valid" in options:
        options["num_valid"] = 30
    case = inputs(37, v=300, bias=seed % 2 == 0, seed=seed, **valid_with(options))
    check(case, through_lse=seed % 3 == 0, impl="chunked", memory_budget=TINY, **options)


def test_small_budgets_give_what_one_block_gives() -> None:
    case = inputs(300, v=300, d=4, bias=True)
    whole = run(case, impl="chunked")
    assert_close(whole.all, expected(case).all, 1e-11)
    for budget in (1, "64KiB", "256KiB", "800KiB", "1MiB"):
        assert_close(run(case, impl="chunked", memory_budget=budget).all, whole.all, 1e-13)


@pytest.mark.parametrize("way", WAYS, ids=WAY_NAMES)
@pytest.mark.parametrize("num_valid", [13, 14, 19, 20, 1000])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_num_valid_may_be_exact_or_too_large(num_valid: int, reduction: str, way: dict[str, Any]) -> None:
    case = inputs(20)
    assert int((case.target != -100).sum()) == 13
    check(case, num_valid=num_valid, reduction=reduction, through_lse=True, **way)


@pytest.mark.parametrize("way", [*WAYS, {"impl": "auto"}], ids=[*WAY_NAMES, "auto"])
def test_a_token_of_weight_zero_counts_as_if_ignored(way: dict[str, Any]) -> None:
    case, token_weight = inputs(20, ignored=None), numbers(20)
    token_weight[::4] = 0.0
    without = case.target.clone()
    without[::4] = -100
    weighted = run(case, token_weight=token_weight, **way)
    ignored = run(case.but(target=without), token_weight=token_weight, **way)
    assert_close([weighted.loss, *weighted.gradients[:2]], [ignored.loss, *ignored.gradients[:2]], 1e-13)


def test_auto_is_as_exact_above_the_threshold() -> None:
    """Just over 16 MiB of fp32 logits, so that auto takes the chunked way."""
    check(inputs(70, v=1 << 16, d=2), impl="auto")


def test_the_reference_can_be_asked_for_by_name() -> None:
    options: dict[str, Any] = {"shift": True, "token_weight": numbers(*LEADING), "z_loss": 0.1}
    for reduction in ("mean", "sum", "none"):
        check(inputs(*LEADING, bias=True), impl="reference", reduction=reduction, **options)
