"""Tiled MLPs: the same gradients, the wide activations gone, and modules that are no MLPs left alone."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.tiled_mlp import find_mlps
from oomph.records import FixUse


def tiled(**options):
    return FixUse("tiled_mlp", options)


class Fused(nn.Module):
    """Phi-3's: gate and up in one matrix."""

    def __init__(self, width=8, hidden=24):
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * F.silu(gate))


class OfSequences(nn.Module):
    """Takes [batch, tokens, features] alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        rows, length, width = x.shape
        return self.down(torch.tanh(self.up(x))).view(rows, length, width)


class Mixing(OfSequences):
    def forward(self, x):
        return self.down(self.up(x).softmax(dim=1))


class Frozen(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.GELU("tanh"), nn.Linear(32, 8, bias=False))
        self[0].weight.requires_grad_(False)


@pytest.mark.parametrize("kind", [Fused, OfSequences, Frozen])
@pytest.mark.parametrize("tile", [1, 4, None])
def test_any_function_of_single_tokens_is_tiled(kind, tile):
    model = seeded(lambda: nn.Sequential(kind(), kind())).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)

    def loss(model, x):
        return model(x).square().sum()

    before = gradients(model, loss, x)
    assert [change.where for change in fixes.apply_to_model(tiled(tile=tile), model)] == ["0", "1"]
    same_gradients(before, gradients(model, loss, x), 1e-12)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same_gradients(before, gradients(twin, loss, x), 1e-12)


def test_the_peak_falls_where_mlps_are_what_fills_it():
    work = workload(layers=2, width=256, heads=4, longest=128)
    work = oomph.Workload(work.model, lambda device: tiny_batch(device, 128, 128), work.loss)
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("tiled_mlp",))
    wide = 128 * 128 * 4 * 256 * 4
    # Each of two MLPs keeps its hidden features before and after gelu; tiles of the default size are left.
    assert proposal.where == tuple(f"blocks.{number}.mlp" for number in range(2))
    assert proposal.saving > 2 * wide


def test_what_cannot_be_tiled_is_left_out_of_the_proposal():
    def build():
        model = seeded(lambda: TinyLM(layers=3, width=128, longest=128))
        model.blocks[1].mlp.fc.register_forward_hook(lambda *_: None)
        return model

    work = oomph.Workload(build, lambda device: tiny_batch(device, 64, 128), plain_loss)
    (proposal,) = fixes.propose(oomph.predict(work, gpu="h200"), work, only=("tiled_mlp",))
    assert proposal.options == {"modules": ["blocks.0.mlp", "blocks.2.mlp"]}
    assert proposal.saving > 0
    assert "not predicted" not in proposal.note


class CountingMLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.register_buffer("runs", torch.zeros(1))

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


class NotTileable(nn.Module):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 8))
        self.normed = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))
        self.hooked = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.hooked[1].register_forward_hook(lambda *_: None)
        self.mixing = Mixing()
        self.writing = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 32), nn.Linear(32, 8))
        self.counting = CountingMLP()
        self.two = nn.Bilinear(8, 8, 8)
        self.replaced = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.replaced.forward = lambda x: x
        self.tileable = Frozen()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dropout", r"dropout: 2 has dropout with p=0\.1, .* set p=0"),
        ("normed", "normed: batch norm"),
        ("hooked", "hooked: 1 has hooks, which would run once per tile"),
        ("mixing", "mixing is not a function of single tokens, so it has no tiles"),
        ("writing", "writing cannot be run on single tokens: the function writes into its tokens"),
        ("counting", "a CountingMLP would write a buffer for every tile"),
        ("two", "two: its forward does not take exactly one argument"),
        ("replaced", "replaced: its forward was replaced already"),
        ("nowhere", "the model has no module 'nowhere'; did you mean 'normed'"),
    ],
)
def test_what_cannot_be_tiled_is_refused_and_the_model_left_as_it_was(name, message):
    model = seeded(NotTileable)
    state = state_of(model)
    with pytest.raises(UserError, match=message):
        fixes.apply_to_model(tiled(modules=["tileable", name]), model)
    assert state_of(model) == state


def test_mlps_that_tile_themselves_are_left_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.own, self.wrapped = oomph.nn.GatedMLP(8, 32), oomph.nn.TiledMLP(plain())

        def forward(self, x):
            return self.wrapped(self.own(x))

    def plain():
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    assert find_mlps(Net()) == []
    with pytest.raises(UserError, match="own: it is tiled already"):
        fixes.apply_to_model(tiled(modules=["own"]), Net())
    assert [one.name for one in find_mlps(nn.ModuleList([plain(), Net()]))] == ["0"]
