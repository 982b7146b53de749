"""modulated_linear against the float64 spec: values, gradients, shapes, dtypes, life in a program."""

from __future__ import annotations

import pytest
import torch
from modulation_inputs import Inputs, inputs, relative_error
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from oomph.errors import ArgumentError
from oomph.ops.modulation import modulated_linear

IMPLS = ("chunked", "triton")
# torch itself says so, once, on processors without bfloat16 products.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def loss(y: Tensor) -> Tensor:
    """Weighs every output differently, in float64, so that no error cancels."""
    return (y.double() * torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)).sum()


def spec(given: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    right = given.copy(torch.float64)
    h, weight, A, B, mod, bias = right.all()
    y = torch.einsum("...d,df->...f", h, weight)
    y = y + torch.einsum("...d,dr,...r,rf->...f", h, A, mod.expand(*h.shape[:-1], -1), B)
    y = y if bias is None else y + bias
    loss(y).backward()
    return y.detach(), right.gradients()


def check(given: Inputs, dtype: torch.dtype, impl: str, tolerance: float) -> None:
    right, right_gradients = spec(given)
    found = given.copy(dtype)
    y = modulated_linear(*found.all(), impl=impl)
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
def test_float64_gives_the_spec_to_the_last_digits(shape: dict) -> None:
    check(inputs(**shape), torch.float64, "chunked", 1e-13)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_gives_the_spec_for_every_implementation(impl: str, shape: dict) -> None:
    check(inputs(**shape), torch.float32, impl, 3e-6)


@pytest.mark.parametrize(
    ("dtype", "impl"),
    [(torch.bfloat16, "chunked"), (torch.float16, "chunked"), (torch.float16, "triton")],
)
def test_in_16_bits_no_gradient_is_worse_than_plain_torch_makes_it(dtype: torch.dtype, impl: str) -> None:
    given = inputs(lead=(2, 150), d=48, f=80, r=5)
    right, right_gradients = spec(given)
    errors = {}
    for each in (impl, "reference"):
        found = given.copy(dtype)
        y = modulated_linear(*found.all(), impl=each)
        loss(y).backward()
        gradients = {"y": y, **found.gradients()}
        rights = {"y": right, **right_gradients}
        errors[each] = {name: relative_error(gradients[name], rights[name]) for name in rights}
    for name, error in errors[impl].items():
        assert error < 1.1 * errors["reference"][name] + 1e-4, name


def test_the_triton_pass_adds_several_row_blocks_into_one_partial(monkeypatch: pytest.MonkeyPatch) -> None:
    from oomph.ops.modulation import fused

    monkeypatch.setattr(fused, "PROGRAMS", 2)
    monkeypatch.setattr(fused, "SMALL_TILE", fused.Tile(rows=16, columns=16, warps=4, stages=1))
    check(inputs(lead=(83,), d=33, f=50, r=4), torch.float32, "triton", 3e-6)


@pytest.mark.parametrize("mod_lead", [(), (1,), (5,), (2, 1), (1, 1), (1, 5)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_broadcast_modulation_gets_the_summed_gradient(mod_lead: tuple[int, ...], impl: str) -> None:
    dtype, tolerance = (torch.float64, 1e-13) if impl == "chunked" else (torch.float32, 3e-6)
    check(inputs(mod_lead=mod_lead), dtype, impl, tolerance)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_empty_batch_gives_empty_output_and_zero_gradients(impl: str) -> None:
    given = inputs(lead=(2, 0)).copy(torch.float32)
    y = modulated_linear(*given.all(), impl=impl)
    assert y.shape == (2, 0, 11)
    y.sum().backward()
    for name in ("weight", "A", "B", "bias"):
        assert not given.gradients()[name].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_non_contiguous_inputs_and_gradients_give_the_spec(impl: str) -> None:
    given = inputs(lead=(6, 5), dtype=torch.float32)
    scattered = Inputs(
        given.h.transpose(0, 1).contiguous().transpose(0, 1),
        given.weight.t().contiguous().t(),
        given.A.t().contiguous().t(),
        given.B.t().contiguous().t(),
        given.mod.flip(0).contiguous().flip(0),
        torch.stack([given.bias, given.bias], dim=1)[:, 0],
    )
    leaves = [each.detach().requires_grad_() for each in scattered.all()]
    y = modulated_linear(*leaves, impl=impl)
    right, right_gradients = spec(given)
    loss(y.transpose(0, 1).contiguous().transpose(0, 1)).backward()
    assert relative_error(y, right) < 3e-6
    for leaf, gradient in zip(leaves, right_gradients.values(), strict=True):
        assert relative_error(leaf.grad, gradient) < 3e-6


def test_the_gradient_of_a_plain_sum_is_right_though_it_is_one_number_expanded() -> None:
    given, plain = inputs().copy(torch.float64), inputs().copy(torch.float64)
    modulated_linear(*given.all()).sum().backward()
    modulated_linear(*plain.all(), impl="reference").sum().backward()
    for name, gradient in given.gradients().items():
        torch.testing.assert_close(gradient, plain.gradients()[name])


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_reaches_its_own_token_only(impl: str) -> None:
    given = inputs(lead=(4,), dtype=torch.float32)
    given.h[2, 1] = float("nan")
    y = modulated_linear(*given.all(), impl=impl)
    assert y[2].isnan().all()
    assert not y[[0, 1, 3]].isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_inputs_give_the_same_bits(impl: str) -> None:
    results = []
    for _ in range(2):
        given = inputs(lead=(90,), dtype=torch.float32).copy(torch.float32)
        modulated_linear(*given.all(), impl=impl).square().sum().backward()
        results.append(given.gradients())
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name])


def test_gradients_have_the_dtype_of_their_inputs() -> None:
    given = inputs(dtype=torch.float32).copy(torch.float32)
    y = modulated_linear(given.h.bfloat16(), *given.all()[1:])
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert {each.dtype for each in given.gradients().values()} == {torch.float32}
    _, right = spec(inputs(dtype=torch.float32))
    assert right.keys() == given.gradients().keys()


def test_a_frozen_bfloat16_weight_serves_float32_hidden_states_exactly() -> None:
    given = inputs()
    given.weight = given.weight.bfloat16().double()
    right, _ = spec(given)
    found = given.copy(torch.float32)
    y = modulated_linear(found.h, given.weight.bfloat16(), found.A, found.B, found.mod, found.bias)
    assert y.dtype == torch.float32
    assert relative_error(y, right) < 1e-6


def test_under_autocast_the_products_and_the_result_are_bfloat16() -> None:
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


@pytest.mark.parametrize("shape", [{"d": 0}, {"f": 0}])
def test_no_features_give_the_bias_or_nothing(shape: dict[str, int]) -> None:
    given, spec = inputs(**shape).copy(torch.float64), inputs(**shape).copy(torch.float64)
    y, right = modulated_linear(*given.all()), modulated_linear(*spec.all(), impl="reference")
    assert torch.equal(y, right)
    y.sum().backward()
    right.sum().backward()
    for name, found in given.gradients().items():
        assert torch.equal(found, spec.gradients()[name]), name


def test_retain_graph_gives_the_same_gradients_twice() -> None:
    given = inputs().copy(torch.float64)
    y = modulated_linear(*given.all())
    leaves = [each for each in given.all() if each is not None]
    first = torch.autograd.grad(loss(y), leaves, retain_graph=True)
    second = torch.autograd.grad(loss(y), leaves)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_a_gradient_of_gradients_is_refused_and_the_reference_gives_it() -> None:
    given = inputs().copy(torch.float64)
    # Of a plain sum too: the gradient that arrives has no graph then, and a penalty would be a constant.
    for scalar in (modulated_linear(*given.all()).square().sum(), modulated_linear(*given.all()).sum()):
        with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
            torch.autograd.grad(scalar, given.A, create_graph=True)
    y = modulated_linear(*given.all(), impl="reference")
    (first,) = torch.autograd.grad(y.square().sum(), given.A, create_graph=True)
    first.sum().backward()
    assert given.B.grad is not None


def test_without_gradients_nothing_is_recorded() -> None:
    given = inputs().copy(torch.float64)
    with torch.no_grad():
        y = modulated_linear(*given.all())
    assert not y.requires_grad
    assert relative_error(y, spec(inputs())[0]) < 1e-13


def test_checkpointing_gives_the_same_gradients() -> None:
    given, plain = inputs().copy(torch.float64), inputs().copy(torch.float64)
    loss(checkpoint(modulated_linear, *given.all(), use_reentrant=False)).backward()
    loss(modulated_linear(*plain.all())).backward()
    for name, gradient in given.gradients().items():
        assert torch.equal(gradient, plain.gradients()[name])


# The compiler looks at .grad of whatever crosses a graph break.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_inside_a_compiled_function_the_answers_are_right() -> None:
    given, plain = inputs().copy(torch.float64), inputs().copy(torch.float64)
    compiled = torch.compile(lambda *each: modulated_linear(*each) * 2, backend="eager")
    loss(compiled(*given.all())).backward()
    loss(modulated_linear(*plain.all()) * 2).backward()
    for name, gradient in given.gradients().items():
        assert torch.equal(gradient, plain.gradients()[name])
