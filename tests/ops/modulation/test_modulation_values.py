"""modulated_linear, its stored weights and its weight deltas against float64: values and gradients."""

import pytest
import torch
from checks import relative_error
from modulation_inputs import inputs

from oomph.ops.modulation import compute_weight_delta, modulated_linear, quantize_int8, weight_delta_norm

# torch itself says so, once, on processors without bfloat16 products.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def loss(y):
    """Weighs every output differently, in float64, so that no error cancels."""
    weights = torch.linspace(-1, 2, y.numel(), dtype=torch.float64, device=y.device)
    return (y.double() * weights.view(y.shape)).sum()


def spec(given):
    right = given.copy(torch.float64)
    h, weight, A, B, mod, bias = right.all()
    y = torch.einsum("...d,df->...f", h, weight)
    y = y + torch.einsum("...d,dr,...r,rf->...f", h, A, mod.expand(*h.shape[:-1], -1), B)
    y = y if bias is None else y + bias
    loss(y).backward()
    return y.detach(), right.gradients()


def check(given, dtype, tolerance):
    right, right_gradients = spec(given)
    found = given.copy(dtype)
    y = modulated_linear(*found.all())
    loss(y).backward()
    assert y.dtype == dtype
    assert relative_error(y, right) < tolerance
    assert found.gradients().keys() == right_gradients.keys()
    for name, gradient in found.gradients().items():
        assert gradient.shape == right_gradients[name].shape
        assert relative_error(gradient, right_gradients[name]) < tolerance, name


SHAPES = [
    {"lead": (1,), "d": 1, "f": 1, "r": 1},
    {"lead": (127,), "d": 3, "f": 257, "r": 3},
    {"lead": (257,), "d": 127, "f": 65, "r": 16},
    {"lead": (2, 3, 5), "d": 16, "f": 32, "r": 17, "bias": False},
    {"lead": (), "d": 5, "f": 7, "r": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_the_specs(shape):
    check(inputs(**shape), torch.float32, 3e-6)
    check(inputs(**shape), torch.float64, 1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_no_gradient_is_worse_than_plain_torch_makes_it(dtype):
    given = inputs(lead=(2, 150), d=48, f=80, r=5)
    right, right_gradients = spec(given)
    errors = {}
    for each in ("chunked", "reference"):
        found = given.copy(dtype)
        y = modulated_linear(*found.all(), impl=each)
        loss(y).backward()
        gradients = {"y": y, **found.gradients()}
        rights = {"y": right, **right_gradients}
        errors[each] = {name: relative_error(gradients[name], rights[name]) for name in rights}
    for name, error in errors["chunked"].items():
        assert error < 1.1 * errors["reference"][name] + 1e-4, name


def test_under_autocast_the_products_and_the_result_are_bfloat16():
    given = inputs(lead=(40,)).copy(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = modulated_linear(*given.all())
        y.float().square().mean().backward()  # backward inside autocast must not change dtypes either
    assert y.dtype == torch.bfloat16
    plain = inputs(lead=(40,)).copy(torch.float32)
    modulated_linear(*plain.all()).square().mean().backward()
    for name, gradient in given.gradients().items():
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, plain.gradients()[name]) < 0.02, name


def test_a_column_of_zeros_or_of_vanishing_numbers_stays_finite():
    weight = torch.randn(5, 3)
    weight[:, 1] = 0
    weight[:, 2] = 1e-45
    stored = quantize_int8(weight)
    assert stored.dequantize().isfinite().all()
    assert not stored.dequantize()[:, 1:].any()


SEVERAL_SLICES = {"lead": (3,), "d": 1100, "f": 4400, "r": 2}  # weights are converted 32 MiB at a time


@pytest.mark.parametrize(
    ("impl", "shape"),
    [("chunked", {"d": 13, "f": 17}), ("reference", {"d": 13, "f": 17}), ("chunked", SEVERAL_SLICES)],
    ids=str,
)
def test_an_8_bit_weight_gives_what_its_dequantised_self_gives(impl, shape):
    dtype = torch.float64
    given = inputs(**shape).copy(dtype, "h A B mod bias")
    plain = inputs(**shape).copy(dtype, "h A B mod bias")
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


def test_a_weight_of_another_dtype_is_converted_in_slices_both_ways():
    given, plain = (inputs(**SEVERAL_SLICES).copy(torch.float64) for _ in range(2))
    weight = given.weight.detach().t().contiguous().t().float().requires_grad_()
    plain.weight = weight.detach().double().requires_grad_()
    modulated_linear(given.h, weight, given.A, given.B, given.mod).square().sum().backward()
    modulated_linear(*plain.all()[:5], impl="reference").square().sum().backward()
    assert relative_error(given.h.grad, plain.h.grad) < 1e-13
    assert weight.grad.dtype == torch.float32
    assert relative_error(weight.grad, plain.weight.grad) < 1e-6


@pytest.mark.parametrize("squared", [False, True])
def test_at_the_start_where_b_is_zero_the_norm_and_its_gradients_are_zero(squared):
    given = inputs().copy(torch.float32)
    B = torch.zeros(3, 11, requires_grad=True)
    norm = weight_delta_norm(given.A, B, given.mod, squared=squared)
    assert not norm.any()
    norm.sum().backward()
    assert not any(each.grad.any() for each in (given.A, B, given.mod))


def test_a_token_times_its_own_weight_is_what_the_op_gives():
    given = inputs(bias=False)
    delta = compute_weight_delta(given.A, given.B, given.mod, (1, 2))
    assert torch.equal(delta, compute_weight_delta(given.A, given.B, given.mod, -3)[1])
    torch.testing.assert_close(modulated_linear(*given.all())[1, 2], given.h[1, 2] @ (given.weight + delta))
    half = [each.bfloat16() for each in (given.A, given.B, given.mod)]
    with torch.autocast("cpu", torch.bfloat16):  # sums are in float32 there, too
        norm = weight_delta_norm(*half)
    right = compute_weight_delta(*(each.double() for each in half), (1, 2)).norm()
    torch.testing.assert_close(norm[1, 2].double(), right, rtol=1e-5, atol=0)
