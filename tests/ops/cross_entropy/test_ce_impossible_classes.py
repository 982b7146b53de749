"""Classes that a bias of -inf makes impossible, in whole blocks of them."""

import pytest
import torch
import torch.nn.functional as F

from oomph.ops import linear_cross_entropy


@pytest.mark.filterwarnings("ignore:divide by zero")  # log 0, in the interpreter
@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_blocks_of_classes_that_are_all_impossible_count_for_nothing(impl: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16, requires_grad=True)
    weight = torch.randn(1000, 16, requires_grad=True)
    bias = torch.zeros(1000)
    bias[:600] = -torch.inf
    target = torch.randint(600, 1000, (5,))
    right = F.cross_entropy(F.linear(x, weight, bias), target)
    # A budget that holds few classes at a time: the first blocks hold no possible class.
    found = linear_cross_entropy(x, weight, target, bias=bias, impl=impl, memory_budget=6000)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, right)
    gradients = torch.autograd.grad(found, (x, weight))
    for ours, theirs in zip(gradients, torch.autograd.grad(right, (x, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
