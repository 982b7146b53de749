"""Lazy tensors and modes: calls in a mode give what they give without it, and idle modes are left out."""

import random

import pytest
import torch
import torch.nn.functional as F
from small import Attention, TinyLM, seeded, tiny_batch
from torch.overrides import TorchFunctionMode

from oomph import fixes
from oomph.fixes.causal_masks import content_of_data
from oomph.fixes.fused_attention import AttentionMode
from oomph.fixes.hoist_batch_invariant import BatchInvariantMode
from oomph.fixes.lazy_tensor import LazyTensor
from oomph.fixes.modulated_linear import DeltaMode

# Causal masks --------------------------------------------------------------------------------------------

MADE = [
    lambda: torch.ones(5, 5),
    lambda: torch.ones(1, 6, 6),
    lambda: torch.zeros(4, 7),
    lambda: torch.full((5, 5), float("-inf")),
    lambda: torch.full((1, 1, 6, 6), True),
]
STEPS = [
    lambda x: x.tril(),
    lambda x: x.tril(1),
    lambda x: x.triu(1),
    lambda x: x.triu(-1),
    lambda x: x == 0,
    lambda x: ~x,
    lambda x: x.bool(),
    lambda x: x.to(torch.bfloat16),
    lambda x: x.float(),
    lambda x: x * -3.0,
    lambda x: x * True,
    lambda x: 1 - x,
    lambda x: x + 2,
    lambda x: x.masked_fill(x == 0, -1.0),
    lambda x: x[..., 1:4, :4],
    lambda x: x[..., :3, 2:],
    lambda x: x[None, None],
    lambda x: x[0],
    lambda x: x[:3],
    lambda x: x[:, None],
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(-1),
    lambda x: x.expand(2, -1, -1),
    lambda x: x.view(1, 1, 5, 5),
    lambda x: x.transpose(-1, -2),
]


def chain(seed):
    chance = random.Random(seed)
    value = chance.choice(MADE)().tril()
    for _ in range(6):
        try:
            value = chance.choice(STEPS)(value)
        except (RuntimeError, IndexError, TypeError):
            continue
    return value


def test_chains_of_calls_on_masks():
    lazy = 0
    for seed in range(300):
        expected = chain(seed)
        with AttentionMode():
            found = chain(seed)
        lazy += isinstance(found, LazyTensor) and not found.expression.computed
        assert found.dtype == expected.dtype, seed
        assert torch.equal(found.clone().nan_to_num(7), expected.nan_to_num(7)), seed
    assert lazy > 60


def test_a_mask_and_its_views_share_what_is_written():
    def run():
        mask = torch.ones(6, 6).tril()
        part, copy = mask[:, 2:], mask * 2
        part[0] = 5
        mask[1, 0] = 7
        return torch.stack([mask[:, 2:], part, copy[:, 2:]])

    expected = run()
    with AttentionMode():
        assert torch.equal(run() + 0, expected)


@pytest.mark.parametrize(
    ("mask", "below", "above"),
    [
        (torch.ones(6, 6).tril(), 1.0, 0.0),
        (torch.ones(1, 1, 2000, 2000, dtype=torch.bool).triu(1), False, True),
        (torch.full((5, 5), float("-inf")).triu(1), 0.0, float("-inf")),
    ],
)
def test_causal_masks_are_recognised_by_their_data(mask, below, above):
    found = content_of_data(mask)
    assert (found.below, found.above, found.shape, found.dtype) == (below, above, mask.shape, mask.dtype)
    assert torch.equal(found.value(), mask)


def test_other_tensors_are_not_causal_masks():
    prefix = torch.ones(6, 6).tril()
    prefix[0, 3] = 1
    window = torch.ones(6, 6).tril().triu(-2)
    nan = torch.full((6, 6), float("nan")).tril()
    for other in (prefix, window, nan, torch.ones(6, 6), torch.ones(5, 6).tril(), torch.ones(6).diag()):
        assert content_of_data(other) is None


# Modes ---------------------------------------------------------------------------------------------------


class Log(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_model_sees_the_fused_call():
    attention = seeded(lambda: Attention(32, 4, 64))
    fixes.apply_to_model("fused_attention", attention)
    with Log() as log:
        attention(torch.randn(2, 8, 32))
    assert F.scaled_dot_product_attention.__name__ in log.names
    assert "softmax" not in log.names


def test_modes_of_several_fixes_do_not_see_each_other_s_work():
    q, k, v = (torch.randn(2, 40, 4) for _ in range(3))

    def run():
        scores = q @ k.mT
        return (scores / 2).tanh().softmax(-1) @ v, torch.einsum("btd,bte->btde", q, k).sum()

    expected = run()
    with DeltaMode(), AttentionMode(), pytest.warns(UserWarning, match="tanh"):
        found = run()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one + 0, other)


@pytest.fixture
def asked(monkeypatch):
    """How many calls each mode was asked about."""
    counts = {BatchInvariantMode: 0, DeltaMode: 0}
    ask = fixes.lazy_tensor.LazyMode.__torch_function__

    def counted(self, *rest):
        counts[type(self)] += 1
        return ask(self, *rest)

    monkeypatch.setattr(fixes.lazy_tensor.LazyMode, "__torch_function__", counted)
    return counts


@pytest.mark.parametrize(
    ("fix", "mode"), [("hoist_batch_invariant", BatchInvariantMode), ("modulated_linear", DeltaMode)]
)
def test_a_mode_that_changes_nothing_is_left_out_of_the_next_calls(fix, mode, asked):
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    expected = model(batch["tokens"])
    fixes.apply_to_model(fix, model)
    assert torch.equal(model(batch["tokens"]), expected)
    assert asked[mode] > 0
    for _ in range(2):  # modules inside are asked once more, when those around them no longer are
        model(batch["tokens"])
    asked[mode] = 0
    assert torch.equal(model(batch["tokens"]), expected)
    assert asked[mode] == 0
    for other in (lambda: model(batch["tokens"][:2]), lambda: model.eval()(batch["tokens"])):
        asked[mode] = 0
        other()
        assert asked[mode] > 0
