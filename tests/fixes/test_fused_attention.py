"""Attention written out in any of many ways runs fused, with the same gradients; what cannot be is left."""

import copy
import math
import pickle

import attention_styles as styles
import pytest
import torch
from attention_styles import FUSED, HEADS, LONGEST, WIDTH, Style
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes import fused_attention
from oomph.fixes.lazy_tensor import LazyTensor
from oomph.fixes.registry import FixContext
from oomph.records import FixUse


@pytest.fixture
def calls(monkeypatch):
    """The calls of ops.attention: their options."""
    made, attention = [], fused_attention.attention

    def counted(*args, **options):
        made.append(options)
        return attention(*args, **options)

    monkeypatch.setattr(fused_attention, "attention", counted)
    return made


def batch(dtype=torch.float64, rows=3, length=13):
    made = torch.Generator().manual_seed(5)
    x = torch.randn(rows, length, WIDTH, generator=made, dtype=torch.float64)
    padding = torch.ones(rows, length, dtype=torch.bool)
    padding[1, -4:] = False
    return {"x": x.to(dtype), "padding": padding}


def loss(model, batch):
    made = torch.Generator().manual_seed(6)
    y = model(batch["x"], batch["padding"])
    return (y * torch.randn(y.shape, generator=made, dtype=torch.float64).to(y)).sum()


@pytest.mark.parametrize("style", FUSED)
def test_gradients_are_the_same_and_undo_restores_the_model(style, calls):
    model, given = seeded(style).double(), batch()
    before = gradients(model, loss, given)
    model.attn = None  # where a style keeps its weights
    state = state_of(model)
    fixes.apply_to_model("fused_attention", model)
    same_gradients(before, gradients(model, loss, given), 1e-12)
    assert len(calls) == (HEADS if style is styles.OneHeadAtATime else 1)
    model.attn = None
    fixes.undo(model)
    assert state_of(model) == state


@pytest.mark.parametrize("style", [styles.PaddingOnly, styles.Annotated, styles.SameFillTwice])
def test_rows_without_a_visible_key_are_as_the_program_has_them(style, calls):
    model, given = seeded(style).double(), batch()
    given["padding"][0, :5] = False  # before the first token: with causality these see nothing
    given["padding"][2] = False
    before = gradients(model, loss, given)
    fixes.apply_to_model("fused_attention", model)
    same_gradients(before, gradients(model, loss, given), 1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("style", [styles.StoredMask, styles.BoolBufferInPlace, styles.GroupedByRepeating])
def test_masks_that_are_causal_are_not_made(style, calls):
    model = seeded(style).double()
    fixes.apply_to_model("fused_attention", model)
    loss(model, batch())
    (options,) = calls
    assert options | {"scale": None} == {"causal": True, "bias": None, "key_mask": None, "scale": None}
    assert all(isinstance(buffer, LazyTensor) for buffer in model.buffers())


class FloatSoftmax(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        return self.joined((q @ k.mT / 2).softmax(-1, dtype=wide).to(v.dtype) @ v)


def test_half_precision_with_a_softmax_in_float(calls):
    model, given = seeded(FloatSoftmax).to(torch.bfloat16), batch(torch.bfloat16)
    exact = gradients(copy.deepcopy(model).double(), loss, {**given, "x": given["x"].double()})
    before = gradients(model, loss, given)
    fixes.apply_to_model("fused_attention", model)
    after = gradients(model, loss, given)
    for name, grad in exact[1].items():
        error, own = ((grads[1][name].double() - grad).norm() for grads in (after, before))
        assert error <= 1.5 * own + 1e-2 * grad.norm(), name
    assert len(calls) == 1


def test_under_autocast(calls):
    model, given = seeded(styles.StoredMask), batch(torch.float32)

    def cast(model, given):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, given)

    before = gradients(model, cast, given)
    fixes.apply_to_model("fused_attention", model)
    same_gradients(before, gradients(model, cast, given), 3e-2)
    assert len(calls) == 1


def test_a_compiled_model_steps_around_it(calls):
    model, given = seeded(styles.StoredMask).double(), batch()
    before = gradients(model, loss, given)
    fixes.apply_to_model("fused_attention", model)
    compiled = torch.compile(model, backend="eager")
    same_gradients(before, (gradients(model, lambda _, given: loss(compiled, given), given)), 1e-12)
    assert len(calls) == 1


def test_masks_follow_the_module_and_stay_in_checkpoints():
    model, plain = seeded(styles.StoredMask), seeded(styles.StoredMask)
    fixes.apply_to_model("fused_attention", model)
    saved = model.state_dict()
    assert torch.equal(saved["bias"], plain.bias)
    plain.load_state_dict(saved)
    model.load_state_dict(plain.state_dict())
    assert model.double().bias.dtype == torch.float64
    assert model.bias.shape == plain.bias.shape
    model.bias[0, 0, 0, 1] = 1.0
    assert model.bias.sum() == plain.bias.sum() + 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_fix_and_are_their_own(copied, calls):
    model, given = seeded(TinyLM), tiny_batch("cpu")
    before = gradients(model, plain_loss, given)
    fixes.apply_to_model("fused_attention", model)
    twin = copied(model)
    same_gradients(before, gradients(twin, plain_loss, given), 1e-5)
    assert len(calls) == 3
    assert isinstance(twin.blocks[0].attention.mask, LazyTensor)


def test_with_recomputation(calls):
    model, given = seeded(TinyLM), tiny_batch("cpu")
    before = gradients(model, plain_loss, given)
    fixes.apply_to_model(["activation_checkpointing", "fused_attention"], model)
    same_gradients(before, gradients(model, plain_loss, given), 1e-5)
    assert len(calls) == 6


# What is not attention as the op computes it: the program's own calls are made ---------------------------


class Dropped(Style):
    def prepare(self):
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        return self.joined(self.dropout((q @ k.mT).softmax(-1)) @ v)


class TalkingHeads(Style):
    def prepare(self):
        self.mix = nn.Linear(HEADS, HEADS)

    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        scores = self.mix((q @ k.mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.joined(scores.softmax(-1) @ v)


class OverQueries(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        return self.joined((q @ k.mT).softmax(dim=2) @ v)


class SoftCapped(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        return self.joined((torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v)


class WithoutSoftmax(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        softmaxed = x.softmax(-1)
        return self.joined((q @ k.mT) @ v) + softmaxed


class SmallFill(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        scores = (q @ k.mT).masked_fill(~padding[:, None, None], -3.0)
        return self.joined(scores.softmax(-1) @ v)


class PrefixMask(Style):
    """Not a triangle any more: the first keys are seen by all."""

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        mask = torch.ones(t, t).tril()
        shown = mask[:, :4]
        shown[:] = 1
        return self.joined((q @ k.mT).masked_fill(mask == 0, -math.inf).softmax(-1) @ v)


class ChangedAfterwards(Style):
    def forward(self, x, padding):
        q, k, v = (y.clone() for y in self.heads_of(x))
        scores = q.detach() @ k.mT
        kept = scores
        q.mul_(2)
        scores = scores * 1.0
        kept += 1.5 * torch.arange(kept.shape[-1])
        return self.joined(scores.softmax(-1) @ v) + self.joined(kept.softmax(-1) @ v + q)


class ViewChanged(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        scores = q @ k.mT
        flat = scores.view(-1, *scores.shape[-2:])
        flat += torch.arange(flat.shape[-1])
        return self.joined(scores.softmax(-1) @ v)


class Looked(Style):
    """Reads the weights besides, in the loss."""

    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        weights = (q @ k.mT).softmax(-1)
        entropy = -(weights * weights.log()).sum()
        assert len(weights) == 3
        assert weights.ndim == 4
        return self.joined(weights @ v) * (1 + entropy)


class BiasAfterFill(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        scores = (q @ k.mT).masked_fill(~padding[:, None, None], -1e9)
        return self.joined((scores + torch.arange(x.shape[1])).softmax(-1) @ v)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class CustomFunction(Style):
    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        return self.joined(_Doubled.apply(q @ k.mT).softmax(-1) @ v)


OWN = [
    Dropped,
    TalkingHeads,
    OverQueries,
    SoftCapped,
    WithoutSoftmax,
    SmallFill,
    Looked,
    PrefixMask,
    ChangedAfterwards,
    ViewChanged,
    BiasAfterFill,
    CustomFunction,
    *styles.NOT_FUSED,
]


@pytest.mark.filterwarnings("ignore:fix 'fused_attention'")
@pytest.mark.parametrize("style", OWN)
def test_anything_else_is_computed_as_it_is_written(style):
    model, given = seeded(style).double(), batch()
    given["padding"][2] = False
    torch.manual_seed(3)
    before = gradients(model, loss, given)
    fixes.apply_to_model(FixUse("fused_attention", {"modules": [""]}), model)
    torch.manual_seed(3)
    same_gradients(before, gradients(model, loss, given), 1e-11)


def test_what_is_not_fused_is_reported_with_its_line_and_the_call_to_use():
    model = seeded(SoftCapped).double()
    fixes.apply_to_model("fused_attention", model)
    with pytest.warns(UserWarning, match=r"test_fused_attention\.py:\d+: tanh .*oomph\.ops\.attention\("):
        loss(model, batch())


def test_weights_that_were_kept_can_be_read_later_unless_their_source_changed():
    model, given = seeded(styles.Annotated).double(), batch()
    loss(model, given)
    wanted = model.attn.detach()
    fixes.apply_to_model("fused_attention", model)
    loss(model, given)
    torch.testing.assert_close(model.attn.detach(), wanted)

    class Biased(styles.Annotated):
        def prepare(self):
            super().prepare()
            self.bias = nn.Parameter(torch.zeros(1, LONGEST, LONGEST, dtype=torch.float64))

        def forward(self, x, padding):
            q, k, v = self.heads_of(x)
            t = x.shape[1]
            self.attn = (q @ k.mT + self.bias[:, :t, :t]).softmax(-1)
            return self.joined(self.attn @ v)

    model = seeded(Biased).double()
    fixes.apply_to_model("fused_attention", model)
    loss(model, given).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(UserError, match="was changed in place"):
        model.attn.sum()


# Proposals -------------------------------------------------------------------------------------------------


def test_it_is_proposed_with_the_modules_and_saves_memory_of_large_masks_too():
    work = workload(layers=3, width=64, heads=4, longest=2048)
    work = oomph.Workload(work.model, lambda device: tiny_batch(device, 4, 512), work.loss, dtype="bfloat16")
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("fused_attention",))
    assert proposal.where == tuple(f"blocks.{i}.attention" for i in range(3))
    assert proposal.slowdown < 1
    after = oomph.predict(oomph.apply(proposal, work), gpu="h200")
    weights, masks = 3 * 4 * 4 * 512 * 512 * 2, 3 * 2048 * 2048 * 2
    assert prediction.peak.allocated - after.peak.allocated > weights + masks
    assert not [one for one in after.allocations if one.shape[-2:] in ((512, 512), (2048, 2048))]
    assert list(fixes.find("fused_attention").targets(FixContext(after, oomph.apply(proposal, work)))) == []


@pytest.mark.parametrize(
    "build", [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)), Dropped], ids=["no attention", "dropout"]
)
def test_it_is_not_proposed_where_it_would_not_help(build):
    def run(model, given):
        out = model(given["x"]) if isinstance(model, nn.Sequential) else loss(model, given)
        return out.sum()

    def on(device):
        return {name: value.to(device) for name, value in batch(torch.float32).items()}

    work = oomph.Workload(lambda: seeded(build), on, run)
    assert fixes.propose(oomph.predict(work, gpu="h200"), work, only=("fused_attention",)) == []


def test_mistakes_are_told_and_change_nothing():
    model = seeded(TinyLM)
    state = state_of(model)
    with pytest.raises(UserError, match="modules='blocks' is not valid; valid: a list of module names"):
        fixes.apply_to_model(FixUse("fused_attention", {"modules": "blocks"}), model)
    modules = ["blocks.0.attention", "blocks.9"]
    with pytest.raises(UserError, match=r"has no module 'blocks\.9'"):
        fixes.apply_to_model(FixUse("fused_attention", {"modules": modules}), model)
    with pytest.raises(UserError, match="no module computes attention in its own code"):
        fixes.apply_to_model("fused_attention", nn.Linear(2, 2))
    assert state_of(model) == state
