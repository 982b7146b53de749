"""Every kernel on a real GPU: the same bits twice, and the peak that was predicted."""

import pytest
import torch
from kernel_calls import CALLS

import oomph
from oomph.units import MiB

pytestmark = pytest.mark.gpu


def result_and_gradients(call):
    torch.manual_seed(0)
    out = call()
    leaves, waiting, seen = [], [out.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            waiting += [following for following, _ in node.next_functions]
    grad = torch.linspace(-1, 2, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("name", CALLS)
def test_the_same_inputs_give_the_same_bits(name):
    one, two = (result_and_gradients(CALLS[name]) for _ in range(2))
    assert all(torch.equal(first, second) for first, second in zip(one, two, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_the_predicted_peak_is_the_measured_one(name):
    def program():
        return lambda: CALLS[name]().sum().backward()

    predicted, measured = (each(program).peak.allocated for each in (oomph.predict, oomph.measure))
    assert abs(predicted - measured) <= 0.01 * measured + MiB
