"""Rotary cosines and sines computed once: the same gradients, fewer tensors, nothing kept after a forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small import gradients, same_gradients, seeded, state_of
from torch import nn

import oomph
from oomph import fixes
from oomph.fixes.activation_checkpointing import KEEP

calls = []  # of rotary modules


class RotaryEmbedding(nn.Module):
    """As older models have it: hidden states are given for their dtype and device only."""

    def __init__(self, size, base=10000.0):
        super().__init__()
        self.base = base
        self.register_buffer("inv_freq", base ** (-torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, x, positions):
        calls.append(self)
        angles = (self.inv_freq[None, :, None] @ positions[:, None, :].to(x.dtype)).transpose(1, 2)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, positions):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        cos, sin = (y.unsqueeze(1) for y in self.rotary(v, positions))
        q, k = (y * cos + torch.roll(y, 1, -1) * sin for y in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c))


class Model(nn.Module):
    def __init__(self, width=32, heads=2, layers=3, rotary=RotaryEmbedding, bases=None):
        super().__init__()
        bases = bases or [10000.0] * layers
        self.layers = nn.ModuleList(Layer(width, heads, rotary(width // heads, base)) for base in bases)

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        for layer in self.layers:
            x = layer(x, positions)
        return x


def loss(model, x):
    return model(x).square().mean()


@pytest.fixture
def x():
    return torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2))


def counted(run):
    calls.clear()
    run()
    return len(calls)


@pytest.mark.parametrize(
    "others",
    [
        [],
        *(["activation_checkpointing:keep=" + keep] for keep in KEEP),
        ["activation_checkpointing:keep=matmuls", "activation_offloading:smallest=1"],
    ],
)
def test_gradients_are_the_same_one_layer_computes_and_undo_restores_the_model(others, x):
    model = seeded(Model)
    before, state = gradients(model, loss, x), state_of(model)
    changed = fixes.apply_to_model(["shared_rotary_embedding", *others], model)
    assert [change.where for change in changed][:4] == ["", *(f"layers.{n}.rotary" for n in range(3))]
    same_gradients(before, gradients(model, loss, x), 0)
    with torch.no_grad():
        assert counted(lambda: model(x)) == 1
        assert counted(lambda: copy.deepcopy(model)(x)) == 1
    fixes.undo(model)
    assert state_of(model) == state
    assert counted(lambda: model(x)) == 3


class Shifting(Model):
    def forward(self, x):
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1).clone()
        for layer in self.layers:
            x = layer(x, positions)
            positions += 1  # the same tensor with other numbers
        return x


class RotaryThatLooks(RotaryEmbedding):
    def forward(self, x, positions):
        cos, sin = super().forward(x, positions)
        return cos * x.detach().abs().amax(), sin


class CarelessLayer(Layer):
    def forward(self, x, positions):
        self.rotary(x, positions)[0].mul_(2)
        return super().forward(x, positions)


class RotaryOfLayer(RotaryEmbedding):
    def forward(self, x, positions):
        return super().forward(x, positions * (1 + self.layer_idx))


def of_layers():
    model = Model(rotary=RotaryOfLayer)
    for number, layer in enumerate(model.layers):
        layer.rotary.layer_idx = number % 2
    return model


def careless():
    model = Model()
    for layer in model.layers:
        layer.__class__ = CarelessLayer
    return model


@pytest.mark.parametrize(
    ("build", "calls"),
    [
        (lambda: Model(bases=[10000.0, 500.0, 10000.0]), 2),  # other settings
        (of_layers, 2),
        (Shifting, 3),  # other positions
        (lambda: Model(rotary=RotaryThatLooks), 3),  # reads the numbers of hidden states
        (careless, 4),  # each layer writes the result that it is given, and asks again
    ],
)
def test_what_would_be_another_result_is_computed_anew(build, calls, x):
    model = seeded(build)
    before = gradients(model, loss, x)
    fixes.apply_to_model("shared_rotary_embedding", model)
    assert counted(lambda: model(x)) == calls
    same_gradients(before, gradients(model, loss, x), 0)


def test_the_saving_is_that_of_the_other_layers_tables():
    work = oomph.Workload(
        lambda: Model(256, 2, 6), lambda device: torch.ones(8, 512, 256, device=device), loss
    )
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("shared_rotary_embedding",))
    tables = 2 * 8 * 512 * 128 * 4
    assert prediction.peak.allocated - proposal.peak.allocated == 5 * tables
    assert proposal.saving > 0
    shared = oomph.apply(proposal, work)
    assert fixes.propose(oomph.predict(shared, gpu="h200"), shared, only=("shared_rotary_embedding",)) == []
