"""Fixes around a whole model leave the others their savings, not only their numbers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from small import MLP, seeded
from torch import nn

import oomph
from oomph.records import FixUse

VOCABULARY, WIDTH = 8192, 16


class OneForward(nn.Module):
    """All but the MLPs is written out in the root's own forward; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.queries, self.project = nn.Parameter(torch.randn(64, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.mlps = nn.ModuleList(MLP(WIDTH) for _ in range(3))

    def forward(self, tokens):
        rows, length = tokens.shape
        x = self.embed(tokens) + self.project(self.queries[:length].expand(rows, -1, -1))
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        scores = (x @ x.transpose(1, 2) / WIDTH**0.5).masked_fill(later, float("-inf"))
        x = x + scores.softmax(-1) @ x
        for mlp in self.mlps:
            x = x + mlp(x)
        return {"logits": self.head(x), "hidden": x}


def loss(model, batch):
    logits = model(batch["tokens"])["logits"]
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["targets"][:, 1:].flatten(), reduction="none")
    return nll.mean()


def batch(device, rows, length):
    tokens = torch.randint(0, VOCABULARY, (rows, length), device=device)
    return {"tokens": tokens, "targets": tokens}


def workload():
    return oomph.Workload(partial(seeded, OneForward), batch, loss, sizes={"rows": 32, "length": 64})


AROUND = {
    "fused_attention": FixUse("fused_attention", {"modules": [""]}),
    "hoist_batch_invariant": FixUse("hoist_batch_invariant"),
    "activation_checkpointing": FixUse("activation_checkpointing", {"blocks": [""]}),
    "activation_offloading": FixUse("activation_offloading", {"blocks": ["", "mlps.0"]}),
}


def logits_made(uses, work):
    """By which operators, in a prediction."""
    found = oomph.predict(oomph.apply(uses, work))
    rows, length = work.sizes["rows"], work.sizes["length"]
    most = (rows - 1) * length * VOCABULARY * 2  # about all of them, in bfloat16
    return {
        made.op
        for made in found.allocations
        if made.shape[-1:] == (VOCABULARY,)
        and made.bytes > most
        and made.op in ("aten.mm", "aten._log_softmax")
    }


@pytest.mark.parametrize("other", AROUND)
def test_logits_stay_away_though_another_fix_is_around_the_whole_model(other):
    work = workload()
    assert logits_made([AROUND[other]], work)
    assert not logits_made([AROUND[other], "fused_linear_cross_entropy"], work)
