"""Every bad argument is one line: what was given, and what is valid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oomph.errors import ArgumentError
from oomph.ops import explain, linear_cross_entropy

X, WEIGHT, TARGET = torch.ones(2, 5, 3), torch.ones(7, 3), torch.zeros(2, 5, dtype=torch.int64)


def call(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"x": X, "weight": WEIGHT, "target": TARGET} | changes
    x, weight, target = (arguments.pop(name) for name in ("x", "weight", "target"))
    return linear_cross_entropy(x, weight, target, **arguments)


def refused(*pieces: str, **changes: Any) -> None:
    """Refused with every piece in its message, by the op and by explain, and in one line."""
    arguments: dict[str, Any] = {"x": X, "weight": WEIGHT, "target": TARGET} | changes
    positional = [arguments.pop(name) for name in ("x", "weight", "target")]
    for attempt in (linear_cross_entropy, lambda *a, **o: explain(linear_cross_entropy, *a, **o)):
        with pytest.raises(ArgumentError) as caught:
            attempt(*positional, **arguments)
        message = str(caught.value)
        assert "\n" not in message
        for piece in pieces:
            assert piece in message


def test_the_call_that_the_others_change_is_right() -> None:
    call()


@pytest.mark.parametrize("impl", ["fast", "", None, "Triton"])
def test_impl(impl: Any) -> None:
    refused(f"impl={impl!r} is not valid", "'auto', 'plain', 'chunked', 'triton', 'reference'", impl=impl)


@pytest.mark.parametrize("reduction", ["average", None, "batchmean"])
def test_reduction(reduction: Any) -> None:
    refused(f"reduction={reduction!r} is not valid", "'mean', 'sum', 'none'", reduction=reduction)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "class_weight", "token_weight"])
def test_tensors_of_whole_numbers_are_refused(name: str) -> None:
    shape = {"x": X.shape, "weight": WEIGHT.shape, "token_weight": TARGET.shape}.get(name, (7,))
    given = torch.ones(shape, dtype=torch.int64)
    refused(f"{name} has dtype torch.int64", "valid: float16, bfloat16, float32, float64", **{name: given})
    refused(f"{name} is a list, not a tensor", **{name: [1.0]})


@pytest.mark.parametrize("name", ["x", "weight"])
def test_what_must_be_there(name: str) -> None:
    refused(f"{name} is None", "valid: a tensor", **{name: None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int16])
def test_targets_that_are_not_class_numbers(dtype: torch.dtype) -> None:
    refused("target must be a tensor of class numbers (int64 or int32)", str(dtype), target=TARGET.to(dtype))


def test_targets_that_are_no_tensor() -> None:
    refused("target must be a tensor of class numbers", "given: list", target=[0, 1])
    refused("target must be a tensor of class numbers", "given: NoneType", target=None)


def test_probabilities_as_targets_are_refused() -> None:
    refused("int64 or int32", "given: torch.float32", target=torch.ones(2, 5, 7))


@pytest.mark.parametrize("shape", [(7,), (1, 7, 3), (), (0, 3)])
def test_a_weight_that_is_no_matrix(shape: tuple[int, ...]) -> None:
    refused("weight must be [classes, hidden size]", f"given: {list(shape)}", weight=torch.ones(shape))


def test_hidden_sizes_that_differ() -> None:
    refused("x must be [..., 3] to match weight [7, 3]", "given: [2, 5, 4]", x=torch.ones(2, 5, 4))
    refused("x must be [..., 7] to match weight [3, 7]", "given: [2, 5, 3]", weight=WEIGHT.t())
    refused("x must be [..., 3]", "given: []", x=torch.ones(()))


@pytest.mark.parametrize("shape", [(2, 4), (10,), (2, 5, 1), ()])
def test_targets_of_another_shape(shape: tuple[int, ...]) -> None:
    target = torch.zeros(shape, dtype=torch.int64)
    refused("target must have x's leading shape [2, 5]", f"given: {list(shape)}", target=target)


def test_targets_that_were_shifted_already() -> None:
    refused("oomph shifts, not the caller", "given: [2, 4]", target=TARGET[:, 1:], shift=True)


def test_shift_without_a_sequence() -> None:
    refused("shift=True needs a sequence dimension", x=torch.ones(3), target=torch.tensor(0), shift=True)


@pytest.mark.parametrize("name", ["bias", "class_weight"])
@pytest.mark.parametrize("shape", [(3,), (7, 1), ()])
def test_one_number_per_class(name: str, shape: tuple[int, ...]) -> None:
    refused(f"{name} must be [7], one per class", f"given: {list(shape)}", **{name: torch.ones(shape)})


@pytest.mark.parametrize("shape", [(2, 4), (10,), ()])
def test_one_weight_per_token(shape: tuple[int, ...]) -> None:
    pieces = ("token_weight must be [2, 5], one per target", f"given: {list(shape)}")
    refused(*pieces, token_weight=torch.ones(shape))


@pytest.mark.parametrize("name", ["weight", "target", "bias", "class_weight", "token_weight"])
def test_tensors_on_other_devices(name: str) -> None:
    given = {"weight": WEIGHT, "target": TARGET, "token_weight": torch.ones(2, 5)}.get(name, torch.ones(7))
    pieces = ("all tensors must be on one device", "x on cpu", f"{name} on meta")
    refused(*pieces, **{name: given.to("meta")})


def test_dtypes_that_differ() -> None:
    pieces = (
        "all tensors must have one dtype (or run under autocast)",
        "x torch.bfloat16",
        "weight torch.float32",
    )
    refused(*pieces, x=X.bfloat16())
    refused("bias torch.float64", bias=torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("name", ["class_weight", "token_weight"])
def test_weights_that_require_a_gradient(name: str) -> None:
    given = torch.ones(7 if name == "class_weight" else (2, 5), requires_grad=True)
    refused(f"{name} requires a gradient, which is not computed; give {name}.detach()", **{name: given})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), "0.1", None, torch.tensor(0.1)])
def test_label_smoothing(value: Any) -> None:
    refused("label_smoothing=", str(value), "choose a number from 0 to 1", label_smoothing=value)


@pytest.mark.parametrize("value", [-1e-4, float("nan"), float("inf"), "0.1", None])
def test_z_loss(value: Any) -> None:
    refused("z_loss=", str(value), "choose 0 or a positive number", z_loss=value)


@pytest.mark.parametrize("value", [0.0, -30.0, float("nan"), float("inf"), "30", True])
def test_softcap(value: Any) -> None:
    refused("softcap=", str(value), "choose a positive number, or None for no cap", softcap=value)


@pytest.mark.parametrize("value", [-1, True, 3.0, "3"])
def test_num_valid(value: Any) -> None:
    refused(
        f"num_valid={value!r} is not valid",
        "give the number of valid targets as an int, or None",
        num_valid=value,
    )


@pytest.mark.parametrize("value", [None, 1.5, "-100", True])
def test_ignore_index(value: Any) -> None:
    refused(f"ignore_index={value!r} is not valid", "give a whole number", ignore_index=value)


@pytest.mark.parametrize("value", [0, -1, "-64MiB", "0MiB", "lots", "64", "64M", "", 1.5, True])
def test_memory_budget(value: Any) -> None:
    refused(
        "size", "is a number with a unit" if not str(value).endswith("M") else "64MiB", memory_budget=value
    )


def test_accumulation_into_a_weight_that_is_computed() -> None:
    weight = nn.Parameter(WEIGHT) * 2
    refused(
        "accumulate_into_grad=True needs a weight that owns its .grad",
        weight=weight,
        accumulate_into_grad=True,
    )


def test_kernels_in_float64() -> None:
    given = {"x": X.double(), "weight": WEIGHT.double()}
    refused(
        "impl='triton' cannot run: float64 is computed in float64", "choose 'auto'", impl="triton", **given
    )


def test_options_must_be_named() -> None:
    with pytest.raises(TypeError, match="positional"):
        linear_cross_entropy(X, WEIGHT, TARGET, None)  # type: ignore[misc]
    with pytest.raises(TypeError, match="unexpected keyword"):
        linear_cross_entropy(X, WEIGHT, TARGET, smoothing=0.1)  # type: ignore[call-arg]
