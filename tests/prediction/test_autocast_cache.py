"""The casts of weights that CUDA autocast keeps: which, how long, and what they keep alive."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from autocast_log import OpLog, bf16, fp32, on
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def test_linear_casts_bias_then_weight_then_input_and_gradients_return_to_float32(log: OpLog) -> None:
    layer, x = nn.Linear(3, 5), torch.randn(2, 3, requires_grad=True)
    with on():
        y = layer(x)
    assert y.dtype == bf16
    assert log.casts == [((5,), bf16), ((5, 3), bf16), ((2, 3), bf16)]
    log.ops.clear()
    y.backward(torch.ones_like(y))
    assert {dtype for _, dtype in log.casts} == {fp32}
    assert len(log.casts) == 3
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == fp32


def test_a_weight_used_twice_in_a_region_is_cast_once(log: OpLog) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with on():
        layer(layer(x))
    assert log.casts == [((4, 4), bf16), ((2, 4), bf16)]
    with on():
        layer(x)
    assert log.casts[2:] == [((4, 4), bf16), ((2, 4), bf16)]


def test_a_weight_is_cast_at_each_use_without_the_cache(log: OpLog) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with on(cache_enabled=False):
        layer(layer(x))
    assert log.casts == [((4, 4), bf16), ((2, 4), bf16), ((4, 4), bf16)]


@pytest.mark.parametrize(
    "weight",
    [
        lambda: torch.randn(4, 4),
        lambda: torch.randn(4, 4, requires_grad=True) * 2,
        lambda: torch.randn(16, requires_grad=True).view(4, 4),
        lambda: torch.randn(16).view(4, 4).requires_grad_(),
    ],
    ids=["no gradient", "not a leaf", "view", "leaf view"],
)
def test_only_leaves_that_need_a_gradient_and_are_no_views_are_kept(
    log: OpLog, weight: Callable[[], torch.Tensor]
) -> None:
    w, x = weight(), torch.randn(2, 4)
    log.ops.clear()
    with on():
        x @ w, x @ w
    assert [shape for shape, _ in log.casts] == [(4, 4), (2, 4)] * 2


def test_kept_casts_live_until_the_outermost_region_ends(log: OpLog) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    # Other tests may leave some, in torch.compile's caches.
    before = {id(t) for t in gc.get_objects() if type(t) is FakeTensor and t.dtype == bf16}
    with on():
        with on():
            with torch.no_grad():
                layer(x)
            gc.collect()
            kept = [
                t
                for t in gc.get_objects()
                if type(t) is FakeTensor and t.dtype == bf16 and id(t) not in before
            ]
            references = [weakref.ref(t) for t in kept]
            del kept
        assert [tuple(r().shape) for r in references if r() is not None] == [(4, 4)]
    assert all(r() is None for r in references)


def test_clear_autocast_cache_drops_kept_casts(log: OpLog) -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    with on():
        layer(x)
        torch.clear_autocast_cache()
        layer(x)
    assert [shape for shape, _ in log.casts].count((4, 4)) == 2


def test_the_cache_does_not_keep_a_weight_alive_nor_mistake_another_for_it(log: OpLog) -> None:
    x = torch.randn(2, 4)
    with on(), torch.no_grad():  # with a gradient, the copy's own history holds the weight
        for _ in range(5):
            w = torch.randn(4, 4, requires_grad=True)
            dead = weakref.ref(w)
            x @ w
            del w
            assert dead() is None
    assert [shape for shape, _ in log.casts].count((4, 4)) == 5
