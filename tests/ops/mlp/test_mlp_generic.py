"""Any function in tiles: parameters found or refused, dropout and autocast as in forward."""

from __future__ import annotations

import functools

import pytest
import torch
from mlp_samples import NormalisedGated, PlainGated, assert_same, results, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from oomph.errors import ArgumentError
from oomph.ops.mlp import tiled_mlp


def test_a_closure_shows_what_it_trains() -> None:
    module, scale = NormalisedGated().double(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def scaled(x: Tensor) -> Tensor:
        return module(x) * scale

    x = tokens(2, 5, 12)
    inputs = [x, scale, *module.parameters()]
    for function in (scaled, functools.partial(scaled), lambda x: scaled(x)):
        assert_same(
            results(lambda function=function: tiled_mlp(function, x, tile=3), inputs),
            results(lambda: scaled(x), inputs),
        )
    bound = module.forward
    inputs = [x, *module.parameters()]
    assert_same(results(lambda: tiled_mlp(bound, x, tile=3), inputs), results(lambda: module(x), inputs))


def test_a_trained_tensor_that_is_not_known_of_is_an_error_and_not_a_lost_gradient() -> None:
    hidden = {"weight": torch.randn(12, 4, dtype=torch.float64, requires_grad=True)}

    def function(x: Tensor) -> Tensor:
        return x @ hidden["weight"]

    x = tokens(5, 12)
    with pytest.raises(ArgumentError, match=r"trains a tensor of shape \(12, 4\).*list it in parameters="):
        tiled_mlp(function, x)
    inputs = [x, hidden["weight"]]
    ours = results(lambda: tiled_mlp(function, x, tile=2, parameters=[hidden["weight"]]), inputs)
    assert_same(ours, results(lambda: function(x), inputs))
    with pytest.raises(ArgumentError, match="list it in parameters="):
        tiled_mlp(function, x.detach())  # also where nothing else is trained
    with torch.no_grad():
        assert_same([tiled_mlp(function, x, tile=2)], [function(x)])


@pytest.mark.parametrize("how", ["plain", "checkpoint", "saved elsewhere"])
def test_a_hook_of_a_parameter_sees_its_whole_gradient_once(how: str) -> None:
    weight, calls = torch.randn(12, 4, dtype=torch.float64, requires_grad=True), []
    weight.register_hook(lambda grad: (calls.append(1), 2 * grad)[1])
    x = tokens(5, 12)

    def run() -> Tensor:
        return tiled_mlp(lambda x: x @ weight, x, tile=2, parameters=[weight])

    def whole() -> Tensor:
        if how == "checkpoint":
            return checkpoint(run, use_reentrant=False)
        if how == "saved elsewhere":
            with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
                return run()
        return run()

    whole().sum().backward()
    assert calls == [1]
    assert_same([weight.grad], [2 * x.detach().sum(0)[:, None].expand(12, 4)])


def test_a_computed_tensor_passes_its_gradient_on() -> None:
    weight = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    x = tokens(5, 12)

    def run(tiled: bool) -> Tensor:
        computed = weight.exp()
        return tiled_mlp(lambda x: x @ computed, x, tile=2) if tiled else x @ computed

    assert_same(results(lambda: run(True), [x, weight]), results(lambda: run(False), [x, weight]))


def test_a_parameter_used_twice_gets_one_whole_gradient_and_an_unused_one_none() -> None:
    module = NormalisedGated().double()
    module.w3.weight = module.w1.weight
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    calls: list[Tensor] = []
    module.w1.weight.register_hook(lambda grad: calls.append(grad))
    x = tokens(9, 12)
    tiled_mlp(module, x, tile=2).sum().backward()
    assert len(calls) == 1
    assert module.get_parameter("unused").grad is None
    (expected,) = torch.autograd.grad(module(x).sum(), [module.w1.weight])
    assert_same([module.w1.weight.grad], [expected])


def test_frozen_parameters_and_frozen_tokens_stay_without_gradients() -> None:
    module = NormalisedGated().double()
    module.w1.requires_grad_(False)
    x = tokens(9, 12).detach()
    inputs = [module.w2.weight, module.w3.weight]
    assert_same(results(lambda: tiled_mlp(module, x, tile=2), inputs), results(lambda: module(x), inputs))
    tiled_mlp(module, x, tile=2).sum().backward()
    assert module.w1.weight.grad is None


def test_dropout_drops_the_same_features_when_a_tile_is_computed_again() -> None:
    dropout = nn.Dropout(0.5)
    x = tokens(64, 12)
    out = tiled_mlp(dropout, x, tile=8)
    before = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out, [x], torch.ones_like(out))
    torch.testing.assert_close(grad * x, out)  # 0 where dropped, 2 where kept
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < (grad == 0).sum() < grad.numel()


def test_autocast_in_backward_is_as_it_was_in_forward() -> None:
    module, x = NormalisedGated(), tokens(9, 12, dtype=torch.float32)
    inputs = [x, *module.parameters()]

    def run(**options: object) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = tiled_mlp(module, x, **options)
            module(x)  # a later call in the same region still finds weights with a graph
        return results(lambda: out, inputs)

    ours, theirs = run(tile=4), run(impl="reference")
    assert ours[0].dtype == theirs[0].dtype == torch.bfloat16
    assert_same(ours, theirs, tolerance=0.05)


def test_parameter_gradients_are_summed_in_fp32_after_one_rounding_per_tile() -> None:
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


def test_shapes_alone_can_be_asked_for_on_the_meta_device() -> None:
    module = NormalisedGated().to("meta")
    assert tiled_mlp(module, torch.empty(2, 5, 12, device="meta")).shape == (2, 5, 12)


@pytest.mark.parametrize("impl", ["chunked", "generic"])
def test_a_gradient_of_gradients_is_refused_and_the_reference_gives_it(impl: str) -> None:
    module, x = PlainGated().double(), tokens(5, 12)
    # Of a plain sum too: the gradient that arrives has no graph then, and a penalty would be a constant.
    for y in (tiled_mlp(module, x, impl=impl, tile=2), tiled_mlp(module, x, impl=impl, tile=2).square()):
        with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
            torch.autograd.grad(y.sum(), x, create_graph=True)
    (grad,) = torch.autograd.grad(tiled_mlp(module, x, impl="reference").sum(), x, create_graph=True)
    assert grad.requires_grad


def test_known_mlps_can_be_called_too_and_no_tokens_are_fine() -> None:
    module = PlainGated().double()
    for shape in ((7, 12), (0, 12), (12,)):
        x = tokens(*shape)
        inputs = [x, *module.parameters()]
        ours = results(lambda x=x: tiled_mlp(module, x, tile=2, impl="generic"), inputs)
        assert_same(ours, results(lambda x=x: module(x), inputs))


def test_backward_twice_through_a_kept_graph_gives_the_same_again() -> None:
    module, x = NormalisedGated().double(), tokens(9, 12)
    loss = tiled_mlp(module, x, tile=4).square().sum()
    inputs = [x, *module.parameters()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert_same(torch.autograd.grad(loss, inputs), first)


def test_each_mistake_in_the_result_of_the_function_is_named() -> None:
    x = tokens(6, 12)
    with pytest.raises(ArgumentError, match="returned a tuple; valid: one tensor"):
        tiled_mlp(lambda x: (x, x), x)
    with pytest.raises(ArgumentError, match=r"made \(12,\) of .*valid: one row per token"):
        tiled_mlp(lambda x: x.sum(0), x, tile=4)
