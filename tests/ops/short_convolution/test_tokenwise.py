"""tokenwise_checkpoint: the same results and gradients as without slices; only inputs are saved."""

import pytest
import torch
from checks import saved_beside

from oomph.errors import ArgumentError
from oomph.ops import tokenwise
from oomph.ops.tokenwise import tokenwise_checkpoint


def gated(x, mask, y, weight):
    return torch.where(mask, torch.sigmoid(x * weight).exp() * y.tanh(), x)


def inputs(length):
    torch.manual_seed(0)
    x, y = (torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return x, torch.rand(2, length, 3) > 0.5, y, torch.randn(3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_slices_change_neither_results_nor_gradients(length, rows, monkeypatch):
    monkeypatch.setattr(tokenwise, "_SLICE_BYTES", rows * 2 * 3 * 4)
    x, mask, y, weight = inputs(length)
    found, right = tokenwise_checkpoint(gated, (x, mask, y), (weight,)), gated(x, mask, y, weight)
    assert torch.equal(found, right)
    for trained in ((x, y, weight), (y,)):
        grad = torch.randn_like(right)
        pair = (torch.autograd.grad(each, trained, grad, retain_graph=True) for each in (found, right))
        for one, two in zip(*pair, strict=True):
            torch.testing.assert_close(one, two)


def test_only_the_inputs_are_saved():
    x, mask, y, weight = inputs(50)
    given = (x, mask, y, weight)
    assert saved_beside(given, lambda: tokenwise_checkpoint(gated, (x, mask, y), (weight,))) == []


def test_second_derivatives_are_refused():
    x, mask, y, weight = inputs(3)
    with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
        torch.autograd.grad(tokenwise_checkpoint(gated, (x, mask, y), (weight,)).sum(), x, create_graph=True)
