"""Delta attention's mode and chunk, set from outside: the same function, less memory."""

import pytest
import torch
from small import gradients, same_gradients, seeded, state_of
from torch import nn

import oomph
from oomph import fixes
from oomph.nn import KimiDeltaAttention, SpikingKDABlock
from oomph.records import FixUse


class Layers(nn.Module):
    def __init__(self, kind, width=32, heads=2, size=16, layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(kind(width, heads, size, **options) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def loss(model, x):
    return model(x).square().mean()


@pytest.fixture
def x():
    return torch.randn(2, 70, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", [KimiDeltaAttention, SpikingKDABlock])
@pytest.mark.parametrize(
    ("mode", "options"), [("scan", {}), ("sequential", {"mode": "chunked", "memory_chunk_size": 16})]
)
def test_gradients_are_the_same_and_undo_restores_the_model(kind, mode, options, x):
    model = seeded(lambda: Layers(kind, mode=mode)).double()
    before, state = gradients(model, loss, x), state_of(model)
    changed = fixes.apply_to_model(FixUse("chunkwise_kda", options), model)
    assert changed[0].what == f"mode={options.get('mode', 'auto')!r} instead of {mode!r}"
    same_gradients(before, gradients(model, loss, x), 1e-9)
    fixes.undo(model)
    assert state_of(model) == state


def work(kind, tokens, rows=4, **options):
    return oomph.Workload(
        lambda: Layers(kind, 128, 4, 32, **options),
        lambda device: torch.ones(rows, tokens, 128, device=device),
        loss,
    )


def test_a_scan_is_proposed_to_become_chunks():
    scanning = work(KimiDeltaAttention, tokens=32, rows=64, mode="scan")
    prediction = oomph.predict(scanning, gpu="h200")
    (proposal,) = fixes.propose(prediction, scanning, only=("chunkwise_kda",))
    assert proposal.where == ("layers.0", "layers.1")
    assert proposal.saving > prediction.peak.reserved * 0.7


def test_smaller_chunks_are_priced_and_a_model_without_such_layers_gets_no_proposal():
    whole = work(KimiDeltaAttention, tokens=4096)
    (proposal,) = fixes.propose(oomph.predict(whole, gpu="h200"), whole, only=("chunkwise_kda",))
    assert proposal.options["memory_chunk_size"] == 512
    assert proposal.saving > 0
    chunked = oomph.apply(proposal, whole)
    assert fixes.propose(oomph.predict(chunked, gpu="h200"), chunked, only=("chunkwise_kda",)) == []
    other = oomph.Workload(lambda: nn.Linear(4, 4), lambda device: torch.ones(2, 4, device=device), loss)
    assert fixes.propose(oomph.predict(other, gpu="h200"), other, only=("chunkwise_kda",)) == []
