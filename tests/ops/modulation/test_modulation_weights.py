"""8-bit and other stored weights: rounding, products in slices, and what is refused."""

from __future__ import annotations

import pytest
import torch
from modulation_inputs import inputs, relative_error
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.modulation import Int8Weight, modulated_linear, quantize_int8, weights

# torch itself says so, once, on processors without bfloat16 products.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def test_each_column_errs_by_at_most_half_its_own_step() -> None:
    weight = torch.randn(40, 30) * torch.logspace(-6, 6, 30)
    stored = quantize_int8(weight)
    assert stored.values.dtype == torch.int8
    assert stored.scale.dtype == torch.float32
    assert ((stored.dequantize() - weight).abs() <= stored.scale / 2 * (1 + 1e-5)).all()
    assert torch.equal(stored.values.abs().amax(dim=0), torch.full((30,), 127, dtype=torch.int8))


def test_halves_round_to_even_and_the_largest_of_either_sign_is_127() -> None:
    weight = torch.tensor([[127.0], [0.5], [1.5], [-2.5], [-127.0]])
    assert quantize_int8(weight).values.flatten().tolist() == [127, 0, 2, -2, -127]


def test_a_column_of_zeros_or_of_vanishing_numbers_stays_finite() -> None:
    weight = torch.randn(5, 3)
    weight[:, 1] = 0
    weight[:, 2] = 1e-45
    stored = quantize_int8(weight)
    assert stored.dequantize().isfinite().all()
    assert not stored.dequantize()[:, 1:].any()


@pytest.mark.parametrize("slice_bytes", [1, 100, 4096])
def test_quantising_in_slices_gives_the_same_bits(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 129, dtype=torch.bfloat16)
    whole = quantize_int8(weight)
    monkeypatch.setattr(weights, "SLICE_BYTES", slice_bytes)
    again = quantize_int8(weight.t().contiguous().t())
    assert torch.equal(whole.values, again.values)
    assert torch.equal(whole.scale, again.scale)


@pytest.mark.parametrize("impl", ["chunked", "triton", "reference"])
@pytest.mark.parametrize("slice_bytes", [1, 300, 1 << 20])
def test_an_8_bit_weight_gives_what_its_dequantised_self_gives(
    impl: str, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SLICE_BYTES", slice_bytes)
    dtype = torch.float32 if impl == "triton" else torch.float64
    given = inputs(d=13, f=17).copy(dtype, "h A B mod bias")
    plain = inputs(d=13, f=17).copy(dtype, "h A B mod bias")
    stored = quantize_int8(given.weight)
    plain.weight = stored.dequantize(dtype)
    found = modulated_linear(given.h, stored, given.A, given.B, given.mod, given.bias, impl=impl)
    right = modulated_linear(*plain.all(), impl="reference")
    assert relative_error(found, right.detach()) < 1e-6
    found.square().sum().backward()
    right.square().sum().backward()
    for name, gradient in given.gradients().items():
        assert relative_error(gradient, plain.gradients()[name]) < 1e-5, name
    assert set(given.gradients()) == {"h", "A", "B", "mod", "bias"}


@pytest.mark.parametrize("trained", [True, False])
def test_a_weight_of_another_dtype_is_converted_in_slices_both_ways(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SLICE_BYTES", 300)
    given, plain = inputs().copy(torch.float64), inputs().copy(torch.float64)
    weight = given.weight.detach().t().contiguous().t().float().requires_grad_(trained)
    plain.weight = weight.detach().double().requires_grad_(trained)
    modulated_linear(given.h, weight, given.A, given.B, given.mod).square().sum().backward()
    modulated_linear(*plain.all()[:5], impl="reference").square().sum().backward()
    assert relative_error(given.h.grad, plain.h.grad) < 1e-13
    if trained:
        assert weight.grad.dtype == torch.float32
        assert relative_error(weight.grad, plain.weight.grad) < 1e-6
    else:
        assert weight.grad is None


def test_a_transposed_weight_is_used_in_place_and_gets_a_gradient_of_its_own_layout() -> None:
    linear = torch.nn.Linear(7, 11)
    given = inputs(dtype=torch.float32)
    modulated_linear(given.h, linear.weight.t(), given.A, given.B, given.mod).sum().backward()
    assert linear.weight.grad.stride() == linear.weight.stride()


def test_slices_stay_within_their_bytes_and_cover_everything() -> None:
    spans = list(weights._spans(14336, 4096 * 2))
    assert spans == [(0, 4096), (4096, 8192), (8192, 12288), (12288, 14336)]
    assert all((stop - start) * 4096 * 2 <= weights.SLICE_BYTES for start, stop in spans)


class Quantised(torch.Tensor):
    """Stands for a tensor of torchao, which need not be installed."""

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor) * 1


Quantised.__module__ = "torchao.stand_in"


def test_a_torchao_tensor_is_dequantised_for_each_product() -> None:
    given, plain = inputs().copy(torch.float64, "h A B mod"), inputs().copy(torch.float64, "h A B mod")
    weight = given.weight.as_subclass(Quantised)
    modulated_linear(given.h, weight, given.A, given.B, given.mod).square().sum().backward()
    modulated_linear(*plain.all()[:5]).square().sum().backward()
    for name, gradient in given.gradients().items():
        torch.testing.assert_close(gradient, plain.gradients()[name])
    with pytest.raises(ArgumentError, match="quantised but requires a gradient; valid: a frozen weight"):
        modulated_linear(given.h, weight.requires_grad_(), given.A, given.B, given.mod)


@pytest.mark.parametrize(
    ("values", "scale", "message"),
    [
        (torch.zeros(2, 3), torch.ones(3), r"values are torch.float32 \[2, 3\]; valid: torch.int8 \[d, f\]"),
        (torch.zeros(6, dtype=torch.int8), torch.ones(6), r"values are torch.int8 \[6\]; valid"),
        (
            torch.zeros(2, 3, dtype=torch.int8),
            torch.ones(2),
            r"scale is torch.float32 \[2\]; valid: float \[3\]",
        ),
        (torch.zeros(2, 3, dtype=torch.int8), torch.ones(3, dtype=torch.int8), r"scale is torch.int8 \[3\]"),
        (torch.zeros(2, 3, dtype=torch.int8), torch.ones(3, device="meta"), "values on cpu, scale on meta"),
        (torch.zeros(2, 3, dtype=torch.int8), torch.ones(3, requires_grad=True), "scale requires a gradient"),
    ],
)
def test_an_8_bit_weight_that_cannot_be_is_refused(values: Tensor, scale: Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Int8Weight(values, scale)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), r"was given torch.float32 \[3\]; valid: a float tensor \[d, f\]"),
        (torch.ones(3, 3, dtype=torch.int8), r"was given torch.int8 \[3, 3\]"),
        ("weight", "was given str; valid"),
        (torch.full((2, 2), float("nan")), "with NaN or infinity; valid: finite numbers"),
        (torch.full((2, 2), float("inf")), "with NaN or infinity; valid: finite numbers"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        quantize_int8(weight)
