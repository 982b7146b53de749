"""Modes cost time in every call into torch: where they find nothing to do, they are left out."""

import pytest
import torch
from small import TinyLM, seeded, tiny_batch
from torch import nn

from oomph import fixes
from oomph.fixes.deferral.quiet_calls import QuietCalls, kind_of
from oomph.fixes.one_row import OneRow
from oomph.fixes.outer_products import DeltaMode


@pytest.fixture
def asked(monkeypatch):
    """How many calls modes of a kind were asked about."""
    counts = {OneRow: 0, DeltaMode: 0}
    for kind in counts:
        ask = kind.__torch_function__

        def counted(self, *rest, kind=kind, ask=ask):
            counts[kind] += 1
            return ask(self, *rest)

        monkeypatch.setattr(kind, "__torch_function__", counted)
    return counts


class Expanding(nn.Module):
    """Repeats its queries when told to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, queries=None):
        if queries is None:
            return self.layer(x)
        return self.layer(queries.expand(x.shape[0], -1, -1)) + x


class Outer(nn.Module):
    """u v^T per token, of which many are large enough to be worth it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return ((self.weight + x.unsqueeze(-1) * x.unsqueeze(-2)) @ x.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(
    ("fix", "mode"), [("hoist_batch_invariant", OneRow), ("modulated_linear", DeltaMode)]
)
def test_calls_with_nothing_to_do_are_soon_not_watched(fix, mode, asked):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    expected = model(batch["tokens"])
    fixes.apply_to_model(fix, model)
    torch.testing.assert_close(model(batch["tokens"]), expected, rtol=0, atol=0)
    assert asked[mode] > 0
    for _ in range(2):  # modules inside look for themselves once, when those around them no longer do
        model(batch["tokens"])
    asked[mode] = 0
    torch.testing.assert_close(model(batch["tokens"]), expected, rtol=0, atol=0)
    assert asked[mode] == 0


@pytest.mark.parametrize(
    ("fix", "mode"), [("hoist_batch_invariant", OneRow), ("modulated_linear", DeltaMode)]
)
def test_a_call_of_another_kind_is_watched_again(fix, mode, asked):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    fixes.apply_to_model(fix, model)
    for _ in range(3):
        model(batch["tokens"])
    for change in (lambda: model(batch["tokens"][:2]), lambda: model.eval()(batch["tokens"])):
        asked[mode] = 0
        change()
        assert asked[mode] > 0


def test_rows_that_are_the_same_are_found_after_calls_without_any(asked):
    model, x, queries = seeded(Expanding), torch.randn(3, 2, 4), torch.randn(1, 2, 4)
    fixes.apply_to_model("hoist_batch_invariant", model)
    for _ in range(2):
        model(x)
    for _ in range(3):
        asked[OneRow] = 0
        model(x, queries)
        assert asked[OneRow] > 0


def test_deltas_are_deferred_in_every_call(asked):
    model, x = seeded(Outer), torch.randn(2, 3, 8)
    expected = model(x)
    fixes.apply_to_model("modulated_linear", model)
    for _ in range(3):
        asked[DeltaMode] = 0
        torch.testing.assert_close(model(x), expected)
        assert asked[DeltaMode] > 0


def test_kinds_differ_by_what_could_change_a_call():
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    kind = kind_of(layer.forward, (x,), {})
    assert kind == kind_of(layer.forward, (torch.zeros(3, 4),), {})
    others = [((x[:1],), {}), ((x[:1].expand(3, 4),), {}), ((x.double(),), {}), ((), {"input": x})]
    others += [((x, True), {}), (([x, x],), {})]
    assert kind not in [kind_of(layer.forward, args, kwargs) for args, kwargs in others]
    with torch.no_grad():
        assert kind_of(layer.forward, (x,), {}) != kind
    assert kind_of(layer.eval().forward, (x,), {}) != kind


def test_arguments_of_unknown_kinds_are_never_quiet():
    quiet = QuietCalls()
    kind = kind_of(nn.Linear(4, 4).forward, (object(),), {})
    quiet.add(kind)
    assert kind is None
    assert kind not in quiet
