"""Weights that change per token: the same outputs and gradients, without the weights of all tokens."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small import gradients, same_gradients, seeded, state_of
from torch import nn

import oomph
from oomph import fixes

W, R = 16, 2  # width of the weight's inputs; its outputs are 24
OUT = 24


class Plastic(nn.Module):
    """Field report 003: a change of the weight per token, from a modulation of low rank."""

    def __init__(self, how, scale=1):
        super().__init__()
        self.how = how
        width, out = scale * W, scale * OUT
        self.weight = nn.Parameter(torch.randn(out, width) / 4)
        self.A, self.B = nn.Parameter(torch.randn(width, R) / 4), nn.Parameter(torch.randn(R, out))
        self.modulation = nn.Linear(width, R)
        self.u, self.v = nn.Linear(width, out), nn.Linear(width, width)

    def forward(self, h):
        return self.how(self, h)


def report(m, h):
    mod = 0.1 * torch.tanh(m.modulation(h))
    delta = torch.einsum("bsr,dr,rf->bsdf", mod, m.A, m.B)
    return torch.einsum("bsd,bsdf->bsf", h, m.weight.t() + delta), delta


def apart(m, h):
    delta = torch.einsum("bsr,dr,rf->bsdf", m.modulation(h), m.A, m.B) * 0.1
    return F.linear(h, m.weight) + torch.einsum("bsd,bsdf->bsf", h, delta), delta


def outer_einsum(m, h):
    delta = torch.einsum("bto,bti->btoi", m.u(h), m.v(h))
    return torch.einsum("btoi,bti->bto", m.weight + delta, h), delta


WAYS = [report, apart, outer_einsum]
PENALTIES = {
    "none": lambda delta: 0,
    "mean of squares": lambda delta: delta.pow(2).mean(),
    "norm": lambda delta: delta.norm(),
    "norm per token": lambda delta: delta.norm(dim=(-2, -1)).mean(),
    "sum of squares": lambda delta: (delta**2).sum((-1, -2)).mean(),
}


class Model(nn.Module):
    def __init__(self, how, penalty="none"):
        super().__init__()
        self.first, self.plastic, self.last = nn.Linear(W, W), Plastic(how), nn.Linear(OUT, W)
        self.penalty = PENALTIES[penalty]

    def forward(self, x):
        h = self.first(x)
        y, delta = self.plastic(h)
        return self.last(y), self.penalty(delta)


def loss(model, x):
    y, penalty = model(x)
    return y.square().mean() + penalty


@pytest.fixture
def x():
    return torch.randn(2, 5, W, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def _in_memory(value):
    return isinstance(value, torch.Tensor) and not value.is_meta


def sizes_made(run):
    """The largest tensor that an operation makes."""
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(one.numel() for one in torch.utils._pytree.tree_leaves(out) if _in_memory(one))
            return out

    with Watch():
        run()
    return max(largest)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
def test_gradients_are_the_same_no_delta_is_made_and_undo_restores_the_model(how, penalty, x):
    model = seeded(lambda: Model(how, penalty)).double()
    before, state = gradients(model, loss, x), state_of(model)
    assert sizes_made(lambda: loss(model, x)) >= 2 * 5 * OUT * W
    fixes.apply_to_model("modulated_linear", model)
    same_gradients(before, gradients(model, loss, x), 1e-11)
    assert sizes_made(lambda: gradients(model, loss, x)) < 2 * 5 * OUT * W
    same_gradients(before, gradients(copy.deepcopy(model), loss, x), 1e-11)
    fixes.undo(model)
    assert state_of(model) == state


def added_to(m, h):
    delta = torch.einsum("bto,bti->btoi", m.u(h), m.v(h))
    delta += m.weight
    delta[:, 0] = 0
    return torch.einsum("btoi,bti->bto", delta, h), delta.clone()


def test_anything_else_is_computed_as_it_was(x):
    model = seeded(lambda: Model(added_to, "mean of squares")).double()
    before = gradients(model, loss, x)
    fixes.apply_to_model("modulated_linear", model)
    same_gradients(before, gradients(model, loss, x), 1e-11)


def test_autocast_gives_what_it_gave_to_its_precision():
    model = seeded(lambda: Model(report)).float()
    x = torch.randn(2, 5, W)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)[0]
        fixes.apply_to_model("modulated_linear", model)
        result = model(x)[0]
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Plastic(report, scale=16)

    def forward(self, x):
        return self.layer(x)[0]


def test_the_saving_is_proposed_where_the_deltas_are():
    work = oomph.Workload(
        Wide, lambda device: torch.ones(2, 64, W * 16, device=device), lambda m, x: m(x).square().mean()
    )
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("modulated_linear",))
    assert proposal.where == ("layer",)
    assert proposal.saving > prediction.peak.reserved * 0.5
    fixed = oomph.apply(proposal, work)
    assert fixes.propose(oomph.predict(fixed, gpu="h200"), fixed, only=("modulated_linear",)) == []
