"""Values and gradients: known MLPs against the reference in float64, other functions against themselves."""

import functools

import pytest
import torch
from checks import Products, saved_beside
from kernel_device import DEVICE, HALF
from mlp_samples import NormalisedGated, assert_same, results, tokens, weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oomph.ops.mlp import MLPWeights, tiled_mlp
from oomph.ops.mlp.weights import ACTIVATIONS

IMPLS = ("chunked", "triton")


@pytest.mark.parametrize("impl", [*IMPLS, "generic"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_the_references(activation, gated, impl):
    w, x = weights(activation, gated, bias=True), tokens(3, 19, 12)
    inputs = [x, *w.named().values()]
    theirs = results(lambda: tiled_mlp(w, x, impl="reference"), inputs)
    assert_same(results(lambda: tiled_mlp(w, x, tile=8, impl=impl), inputs), theirs)


def test_a_transposed_weight_gets_its_gradient_in_its_own_layout():
    w, x = weights(), tokens(30, 12)
    stored = w.up.detach().t().contiguous().requires_grad_()
    tiled_mlp(MLPWeights(stored.t(), w.down, w.gate), x, tile=8).sum().backward()
    tiled_mlp(w, x, impl="reference").sum().backward()
    assert stored.grad.is_contiguous()
    assert_same([stored.grad.t()], [w.up.grad])


HALF_AND_SINGLE = [
    ("chunked", torch.bfloat16),
    ("chunked", torch.float16),
    ("chunked", torch.float32),
    ("triton", HALF),
    ("triton", torch.float32),
]


@pytest.mark.parametrize(("impl", "dtype"), HALF_AND_SINGLE)
def test_errors_are_no_larger_than_the_references_in_the_same_dtype(impl, dtype):
    # Over several inputs, because a bias has so few elements that the error of a single gradient is chance.
    count = 4
    where = {"dtype": dtype, "device": DEVICE if impl == "triton" else "cpu"}
    ours, theirs, sizes = (torch.zeros(8, dtype=torch.float64, device=where["device"]) for _ in range(3))
    for number in range(count):
        w, x = weights(bias=True, d=32, f=64, seed=number, **where), tokens(300 + number, 32, **where)
        inputs = [x, *w.named().values()]
        w64 = MLPWeights(
            **{name: each.detach().double().requires_grad_() for name, each in w.named().items()}
        )
        x64 = x.detach().double().requires_grad_()
        truth = results(lambda w=w64, x=x64: tiled_mlp(w, x, impl="reference"), [x64, *w64.named().values()])
        plain = results(lambda w=w, x=x: tiled_mlp(w, x, impl="reference"), inputs)
        tiled = results(lambda w=w, x=x: tiled_mlp(w, x, tile=64, impl=impl), inputs)
        assert {each.dtype for each in tiled} == {dtype}
        ours += torch.stack([(one - right).square().sum() for one, right in zip(tiled, truth, strict=True)])
        theirs += torch.stack([(one - right).square().sum() for one, right in zip(plain, truth, strict=True)])
        sizes += torch.stack([right.square().sum() for right in truth])
    assert (ours.sqrt() <= 1.02 * theirs.sqrt() + 1e-6 * sizes.sqrt()).all()


def test_nan_spreads_to_its_own_token_and_to_the_weights():
    for activation in ACTIVATIONS:
        for impl in IMPLS:
            w, x = weights(activation), tokens(10, 12).detach()
            x[4, 0] = float("nan")
            x.requires_grad_()
            value, dx, d_up, *_ = results(
                lambda w=w, x=x, impl=impl: tiled_mlp(w, x, tile=4, impl=impl), [x, w.up]
            )
            assert value[4].isnan().all()
            assert dx[4].isnan().all()
            assert d_up.isnan().any()
            assert not value[[0, 9]].isnan().any()


@pytest.mark.parametrize(("trained", "expected"), [("all", 11 * 2), ("x", 8 * 2), ("down", 6 * 2)])
def test_frozen_parts_cost_no_product(trained, expected):
    w, x = weights(), tokens(16, 12)
    if trained != "all":
        for name, each in {"x": x, **w.named()}.items():
            each.requires_grad_(name == trained)
    with Products() as counted:
        tiled_mlp(w, x, tile=8, impl="chunked").sum().backward()
    assert len(counted.shapes) == expected  # over two tiles


def test_saved_for_backward_are_the_inputs():
    w, x = weights(), tokens(40, 12)
    assert saved_beside([x, *w.named().values()], lambda: tiled_mlp(w, x, tile=8)) == []


@pytest.mark.parametrize("known", [True, False])
def test_under_autocast_products_are_in_bfloat16_and_gradients_in_the_dtype_of_what_they_belong_to(known):
    x = tokens(40, 32, dtype=torch.float32)
    given = weights(bias=True, d=32, f=64, dtype=torch.float32) if known else NormalisedGated(32, 64)
    inputs = [x, *(given.named().values() if known else given.parameters())]

    def run(**options):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = tiled_mlp(given, x, **options)
            if not known:
                given(x)  # a later call in the same region still finds weights with a graph
        return results(lambda: out, inputs)  # backward outside autocast, as is usual

    theirs = run(impl="reference")
    for tile in (16, 64):
        ours = run(tile=tile)
        assert_same(ours, theirs, tolerance=0.05)
        assert ours[0].dtype == torch.bfloat16


def test_everything_that_a_callable_trains_is_found():
    module, scale = NormalisedGated().double(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    hidden = {"weight": torch.randn(12, 4, dtype=torch.float64, requires_grad=True)}

    def function(x):
        return module(x) * scale @ hidden["weight"]

    x = tokens(2, 5, 12)
    inputs = [x, scale, hidden["weight"], *module.parameters()]
    theirs = results(lambda: function(x), inputs)
    for given in (function, functools.partial(function), lambda x: function(x)):
        assert_same(results(lambda given=given: tiled_mlp(given, x, tile=3), inputs), theirs)
    assert_same(results(lambda: tiled_mlp(function, x, tile=3, parameters=inputs[1:]), inputs), theirs)
    ours = results(lambda: tiled_mlp(function, x.detach(), tile=3), inputs[1:])
    assert_same(ours, results(lambda: function(x.detach()), inputs[1:]))
    with torch.no_grad():
        assert_same([tiled_mlp(function, x, tile=2)], [function(x)])


@pytest.mark.parametrize("how", ["plain", "checkpoint", "saved elsewhere"])
def test_a_hook_of_a_parameter_sees_its_whole_gradient_once(how):
    weight, calls = torch.randn(12, 4, dtype=torch.float64, requires_grad=True), []
    weight.register_hook(lambda grad: (calls.append(1), 2 * grad)[1])
    x = tokens(5, 12)

    def run():
        return tiled_mlp(lambda x: x @ weight, x, tile=2, parameters=[weight])

    def whole():
        if how == "checkpoint":
            return checkpoint(run, use_reentrant=False)
        if how == "saved elsewhere":
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                return run()
        return run()

    whole().sum().backward()
    assert calls == [1]
    assert_same([weight.grad], [2 * x.detach().sum(0)[:, None].expand(12, 4)])


def test_a_computed_tensor_passes_its_gradient_on():
    weight = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    x = tokens(5, 12)

    def run(tiled):
        computed = weight.exp()
        return tiled_mlp(lambda x: x @ computed, x, tile=2) if tiled else x @ computed

    assert_same(results(lambda: run(True), [x, weight]), results(lambda: run(False), [x, weight]))


def test_a_parameter_used_twice_gets_one_whole_gradient_and_an_unused_one_none():
    module = NormalisedGated().double()
    module.w3.weight = module.w1.weight
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    calls = []
    module.w1.weight.register_hook(lambda grad: calls.append(grad))
    x = tokens(9, 12)
    tiled_mlp(module, x, tile=2).sum().backward()
    assert len(calls) == 1
    assert module.get_parameter("unused").grad is None
    (expected,) = torch.autograd.grad(module(x).sum(), [module.w1.weight])
    assert_same([module.w1.weight.grad], [expected])


def test_dropout_drops_the_same_features_when_a_tile_is_computed_again():
    dropout = nn.Dropout(0.5)
    x = tokens(64, 12)
    out = tiled_mlp(dropout, x, tile=8)
    before = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out, [x], torch.ones_like(out))
    torch.testing.assert_close(grad * x, out)  # 0 where dropped, 2 where kept
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < (grad == 0).sum() < grad.numel()


def test_parameter_gradients_are_summed_in_fp32_after_one_rounding_per_tile():
    torch.manual_seed(0)
    module = NormalisedGated(32, 64).bfloat16()
    x = tokens(512, 32, dtype=torch.bfloat16)
    exact = NormalisedGated(32, 64).double()
    exact.load_state_dict(module.state_dict())
    inputs = list(module.parameters())
    truth = results(lambda: exact(x.double()), list(exact.parameters()))
    theirs = results(lambda: module(x), inputs)
    ours = results(lambda: tiled_mlp(module, x, tile=16), inputs)
    for one, other, right in zip(ours, theirs, truth, strict=True):
        assert (one - right).norm() <= 1.1 * (other - right).norm()
