"""Blocks that are not traced leave exactly the events that they would leave if they were."""

import functools
import operator
import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import oomph
from oomph.prediction import isolation
from oomph.prediction.ops.rules import RuleGuard
from oomph.prediction.tracer.repeats import RepeatedBlocks

BLOCKS, WIDTH = 7, 32
FIRST = [f"blocks.{index}" for index in range(BLOCKS)]
TRACED = b"a forward pass is traced\n"  # in any process


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        os.write(2, TRACED)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(block(index) for index in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 50)
        self.seen = []

    def run(self, block, x):
        return block(x)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


class Checkpointed(Model):
    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class CountedLayer(LlamaDecoderLayer):
    def forward(self, *args, **kwargs):
        os.write(2, TRACED)
        return super().forward(*args, **kwargs)


def train(model, batches=1, steps=2, autocast=False):
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters())
    ids = torch.zeros(4, 16, dtype=torch.int64, device="cuda")
    for _ in range(steps):
        for _ in range(batches):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                out = model(ids)
            F.cross_entropy(out.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def several_models():
    train(Model(), batches=2, steps=1)
    train(Checkpointed(), steps=1)
    frozen = Model()
    for block in frozen.blocks:
        block.up.requires_grad_(False)
    train(frozen, steps=1, autocast=True)
    partly = Model()
    partly.blocks.extend(Block(BLOCKS + index) for index in range(BLOCKS))
    oomph.apply({"fix": "activation_checkpointing", "options": {"blocks": FIRST}}, partly)
    train(partly, steps=1)
    of_transformers()


def of_transformers():
    """Its layers know their index, which they hand on to a cache of keys."""
    model = _llama(use_cache=False)
    for layer in model.model.layers:
        layer.__class__ = CountedLayer
    ids = torch.zeros(4, 16, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        model(input_ids=ids)
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()


def _llama(**options):
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=BLOCKS, **sizes, **options)).cuda()


class Larger(Block):
    """A block in the middle makes another tensor; only its index says so."""

    def forward(self, x):
        return super().forward(F.relu(x) if self.index == 4 else x)


class Hoarding(Block):
    hoard: list[torch.Tensor] = []  # noqa: RUF012

    def forward(self, x):
        out = super().forward(x)
        self.hoard.append(out)
        return out


class Skipping(Model):
    """The output of the fifth block is used twice."""

    def forward(self, ids):
        x = kept = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            x = block(x)
            kept = x if index == 4 else kept
        return self.head(x + kept)


class KeepingGradients(Model):
    def run(self, block, x):
        out = block(x)
        if block is self.blocks[4]:
            out.register_hook(self.seen.append)
        return out


class Reading(Model):
    """Depends on a side effect of a block."""

    def forward(self, ids):
        out = super().forward(ids)
        assert self.blocks[4].done
        return out


class Noting(Block):
    done = False

    def forward(self, x):
        self.done = True
        return super().forward(x)


def _traced(capfd):
    return capfd.readouterr().err.encode().count(TRACED)


def _summary():
    found = oomph.predict(several_models, gpu="h200")
    fields = operator.attrgetter(*"bytes op module site stage kind saved parent call".split())
    made = list(map(fields, found.allocations))
    # The order in which autocast lets go of its casts is not defined.
    return found.peak, sorted(map(tuple, found.events)), made, found.notes, found.step_seconds


def test_repeated_blocks_leave_the_events_of_traced_ones(monkeypatch, capfd):
    repeated, calls = _summary(), _traced(capfd)
    monkeypatch.setattr(isolation, "_restarted", True)
    assert _summary() == repeated
    assert calls < 0.7 * _traced(capfd)


@pytest.mark.parametrize("method", ["_check_call", "_output", "_repeat", "_open_backward", "_backward_of"])
def test_a_failure_of_ours_is_not_the_programs(monkeypatch, method):
    def failing(*args, **kwargs):
        raise ZeroDivisionError("injected")

    expected = _peak_of_one_step()
    monkeypatch.setattr(RepeatedBlocks, method, failing)
    with pytest.raises(oomph.OomphError, match="injected"):  # as in all tests, which are strict
        _peak_of_one_step.__wrapped__()
    monkeypatch.setattr(RuleGuard, "strict", False)
    assert _peak_of_one_step.__wrapped__() == expected


@functools.cache
def _peak_of_one_step():
    return oomph.predict(lambda: train(Model(), steps=1), gpu="h200").peak


@pytest.mark.parametrize("make", [
    partial(Model, Larger), partial(Model, Hoarding), Skipping, KeepingGradients, partial(Reading, Noting)
])  # fmt: skip
def test_other_blocks_are_traced(make, capfd):
    """Whether that shows before a block was repeated, or only afterwards."""
    oomph.predict(lambda: train(make(), steps=1), gpu="h200")
    assert _traced(capfd) >= BLOCKS


class Part(nn.Module):
    def forward(self, x):
        return x[:, :256]


@pytest.mark.parametrize(
    ("shown", "kept_mib", "repeats"),
    [(nn.Identity(), 1, True), (nn.ReLU(), 1, True), (Part(), 4, False)],
    ids=["a product", "made beside another tensor", "a part of a tensor"],
)
def test_calls_whose_results_the_program_keeps_are_repeated(shown, kept_mib, repeats, capfd):
    class Sampler(nn.Sequential):
        def forward(self, x):
            os.write(2, TRACED)
            return super().forward(x)

    def sample(calls):
        model = Sampler(nn.Linear(256, 256 * kept_mib), shown).cuda()
        x = torch.zeros(1024, 256, device="cuda")
        with torch.no_grad():
            return [model(x) for _ in range(calls)]

    few, many = (oomph.predict(partial(sample, calls)).peak.allocated for calls in (3, 20))
    assert many - few == 17 * kept_mib << 20
    assert (_traced(capfd) < 3 + 5) == repeats


@pytest.mark.parametrize("how", ["a transposed input", "with dropout"])
def test_a_call_that_computes_something_else_is_traced(how):
    def evaluate(calls):
        model = nn.Sequential(nn.Dropout(), nn.Flatten(0), nn.Unflatten(0, (256, 256)), nn.Linear(256, 1))
        model.cuda().eval()
        x = torch.zeros(256, 256, device="cuda")
        with torch.no_grad():
            for _ in range(calls):
                model(x)
            if how == "with dropout":
                model[0].train()
                model(x)
            else:
                model(x.t())  # which it copies

    few, many = (oomph.predict(partial(evaluate, calls)).peak.allocated for calls in (1, 6))
    assert few == many
