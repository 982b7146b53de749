"""Attention written out in many ways runs fused, with the same gradients; what cannot be is left as it is."""

import copy
import math
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes import fused_attention
from oomph.fixes.fused_attention import AttentionMode
from oomph.fixes.lazy_tensor import in_mode
from oomph.fixes.registry import FixContext
from oomph.records import FixUse

# Attention as people write it: the same weights and arguments, each in its own way -----------------------

WIDTH, HEADS, LONGEST = 16, 4, 32


class Style(nn.Module):
    """`forward(x, padding)`: x [B, T, C], padding [B, T] True where there is a token."""

    key_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # A softmax does not see a bias of the keys: its gradient would be nothing but rounding.
        self.k, self.v = (nn.Linear(WIDTH, self.key_heads * size, bias=False) for _ in range(2))
        self.prepare()

    def prepare(self) -> None: ...

    def heads_of(self, x):
        """q, k, v as [B, H, T, D]."""
        b, t, _ = x.shape
        return (f(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))

    def joined(self, y):
        return self.o(y.transpose(1, 2).reshape(y.shape[0], y.shape[2], WIDTH))


class StoredMask(Style):
    """nanoGPT."""

    def prepare(self):
        self.register_buffer("bias", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))
        self.attn_dropout = nn.Dropout(0.0)

    def forward(self, x, padding):
        t = x.size(1)
        q, k, v = self.heads_of(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.joined(self.attn_dropout(att) @ v)


class OneHeadAtATime(Style):
    """ "Let's build GPT": modules of one head, three dimensions."""

    def prepare(self):
        self.register_buffer("tril", torch.tril(torch.ones(LONGEST, LONGEST)))

    def forward(self, x, padding):
        t = x.shape[1]
        heads = []
        for q, k, v in zip(*(f(x).chunk(HEADS, -1) for f in (self.q, self.k, self.v)), strict=True):
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = wei.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
            heads.append(F.softmax(wei, dim=-1) @ v)
        return self.o(torch.cat(heads, -1))


class BoolBufferInPlace(Style):
    """ "LLMs from scratch": an upper triangle, filled in place, scaled inside the softmax."""

    def prepare(self):
        self.register_buffer("mask", torch.triu(torch.ones(LONGEST, LONGEST), diagonal=1), persistent=False)

    def forward(self, x, padding):
        n = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:n, :n], -torch.inf)
        weights = torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)
        return self.joined((weights @ v).contiguous())


class AddedMaskBuffer(Style):
    """Zeros and -inf, added; a learned bias besides."""

    def prepare(self):
        self.register_buffer("mask", torch.full((LONGEST, LONGEST), -torch.inf).triu(1))
        self.relative = nn.Parameter(torch.randn(HEADS, LONGEST, LONGEST))

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = torch.matmul(q, k.mT) / math.sqrt(q.size(-1))
        scores = scores + self.relative[:, :t, :t]
        scores = scores + self.mask[:t, :t].to(scores.dtype)
        return self.joined(torch.matmul(scores.softmax(-1), v))


def attention(query, key, value, mask=None, dropout=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


class Annotated(Style):
    """The annotated transformer: a function, padding and future in one mask, weights kept."""

    def prepare(self):
        self.dropout, self.attn = nn.Dropout(p=0.0), None

    def forward(self, x, padding):
        t = x.shape[1]
        mask = padding[:, None, None, :] & torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        y, self.attn = attention(*self.heads_of(x), mask=mask, dropout=self.dropout)
        return self.joined(y)


class PaddingOnly(Style):
    """An encoder: keys masked by a large negative number, one sequence of nothing but padding."""

    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~padding[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.joined(torch.einsum("bhqk,bhkd->bhqd", torch.softmax(scores, -1), v))


class EinsumWithoutTranspose(Style):
    """Heads in the third dimension throughout; a causal mask made on the way; additive padding."""

    def forward(self, x, padding):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1) for f in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        causal = torch.triu(torch.full((t, t), float("-inf"), dtype=x.dtype, device=x.device), diagonal=1)
        scores = scores + causal
        scores = scores + (1.0 - padding[:, None, None, :].to(x.dtype)) * -10000.0
        return self.o(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(b, t, WIDTH))


class GroupedByRepeating(Style):
    """GPT-2's torch.where with a scalar on the device; keys repeated."""

    key_heads = 2

    def prepare(self):
        mask = torch.tril(torch.ones((LONGEST, LONGEST), dtype=torch.bool))
        self.register_buffer("bias", mask.view(1, 1, LONGEST, LONGEST), persistent=False)

    def forward(self, x, padding):
        q, k, v = self.heads_of(x)
        k, v = (y.repeat_interleave(HEADS // 2, dim=1) for y in (k, v))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
        t, s = q.size(-2), k.size(-2)
        causal = self.bias[:, :, s - t : s, :s]
        least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
        scores = torch.where(causal, scores.to(scores.dtype), least)
        return self.joined(torch.matmul(nn.functional.softmax(scores, dim=-1).type(v.dtype), v))


class OneKeyHead(Style):
    """Multi-query attention, scaled in place, bias added in place."""

    key_heads = 1

    def prepare(self):
        self.relative = nn.Parameter(torch.randn(1, 1, LONGEST, LONGEST))

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(-1, -2)
        scores *= q.shape[-1] ** -0.5
        scores += self.relative[..., :t, :t]
        scores = scores.masked_fill(padding[:, None, None, :].logical_not(), float("-inf"))
        return self.joined(scores.softmax(dim=-1) @ v)


class SameFillTwice(Style):
    """Future and padding, both with one number; keys are masked by a matrix."""

    def prepare(self):
        self.register_buffer("mask", torch.ones(LONGEST, LONGEST, dtype=torch.bool).tril())

    def forward(self, x, padding):
        t = x.shape[1]
        q, k, v = self.heads_of(x)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.mask[None, None, :t, :t], -1e9)
        scores = scores.masked_fill(~padding[:, None, None, :].expand(-1, 1, t, -1), -1e9)
        return self.joined(scores.softmax(-1) @ v)


class SeparateFunctions(nn.Module):
    """The attention in a module of its own, without parameters, which returns the weights too."""

    class Scaled(nn.Module):
        def forward(self, q, k, v, mask):
            attn = torch.bmm(q, k.transpose(1, 2)) / np_power(k.size(2))
            attn = torch.softmax(attn.masked_fill(mask, -math.inf), 2)
            return torch.bmm(attn, v), attn

    def __init__(self):
        super().__init__()
        self.qkv, self.o, self.attention = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), self.Scaled()

    def forward(self, x, padding):
        q, k, v = self.qkv(x).chunk(3, -1)
        future = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(diagonal=1).bool()
        y, _ = self.attention(q, k, v, future)
        return self.o(y)


def np_power(size):
    return torch.tensor(size).float().sqrt()


FUSED = [
    StoredMask,
    OneHeadAtATime,
    BoolBufferInPlace,
    AddedMaskBuffer,
    Annotated,
    PaddingOnly,
    EinsumWithoutTranspose,
    GroupedByRepeating,
    OneKeyHead,
    SameFillTwice,
    SeparateFunctions,
]


# Fused ---------------------------------------------------------------------------------------------------


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
    assert len(calls) == (HEADS if style is OneHeadAtATime else 1)
    model.attn = None
    fixes.undo(model)
    assert state_of(model) == state


@pytest.mark.parametrize("style", [PaddingOnly, Annotated, SameFillTwice])
def test_rows_without_a_visible_key_are_as_the_program_has_them(style, calls):
    model, given = seeded(style).double(), batch()
    given["padding"][0, :5] = False  # before the first token: with causality these see nothing
    given["padding"][2] = False
    before = gradients(model, loss, given)
    fixes.apply_to_model("fused_attention", model)
    same_gradients(before, gradients(model, loss, given), 1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("style", [StoredMask, BoolBufferInPlace, GroupedByRepeating])
def test_causal_masks_are_recognised(style, calls):
    model = seeded(style).double()
    fixes.apply_to_model("fused_attention", model)
    loss(model, batch())
    (options,) = calls
    assert options | {"scale": None} == {"causal": True, "bias": None, "key_mask": None, "scale": None}


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
    model, given = seeded(StoredMask), batch(torch.float32)

    def cast(model, given):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, given)

    before = gradients(model, cast, given)
    fixes.apply_to_model("fused_attention", model)
    same_gradients(before, gradients(model, cast, given), 3e-2)
    assert len(calls) == 1


def test_a_compiled_model_steps_around_it(calls):
    model, given = seeded(StoredMask).double(), batch()
    before = gradients(model, loss, given)
    fixes.apply_to_model("fused_attention", model)
    compiled = torch.compile(model, backend="eager")
    same_gradients(before, (gradients(model, lambda _, given: loss(compiled, given), given)), 1e-12)
    assert len(calls) == 1


def test_a_mask_that_is_written_or_loaded_later_is_not_causal_any_more(calls):
    model, plain = seeded(StoredMask).double(), seeded(StoredMask).double()
    fixes.apply_to_model("fused_attention", model)
    loss(model, batch())
    with torch.no_grad():
        plain.bias[0, 0, 0, 1] = 1.0
    model.load_state_dict(plain.state_dict())
    same_gradients(gradients(plain, loss, batch()), gradients(model, loss, batch()), 1e-12)
    assert [call["causal"] for call in calls] == [True, False]


MASKS = {
    "arange": lambda t: torch.arange(t)[:, None] < torch.arange(t),
    "triu": lambda t: torch.ones(t, t).triu(1) == 1,
    "not of tril": lambda t: ~torch.ones(1, t, t, dtype=torch.bool).tril(),
    "full": lambda t: torch.zeros(t, t).masked_fill(torch.full((t, t), True).triu(1), -1.0) < 0,
    "window": lambda t: torch.ones(t, t).tril().triu(-3) == 0,
    "itself, too": lambda t: torch.ones(t, t).triu(0) == 1,
    "random": lambda t: torch.rand(t, t) < 0.3,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_made_in_forward(name, calls):
    def attend(q, k, v, padding):
        return (q @ k.mT).masked_fill(MASKS[name](q.shape[2]), -1e9).softmax(-1) @ v

    model = seeded(lambda: Own(attend)).double()
    torch.manual_seed(0)
    before = gradients(model, loss, batch())
    fixes.apply_to_model("fused_attention", model)
    torch.manual_seed(0)
    same_gradients(before, gradients(model, loss, batch()), 1e-11)
    assert calls[0]["causal"] == (name in ("arange", "triu", "not of tril", "full"))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_fix_and_are_their_own(copied, calls):
    model, given = seeded(TinyLM), tiny_batch("cpu")
    before = gradients(model, plain_loss, given)
    fixes.apply_to_model("fused_attention", model)
    twin = copied(model)
    same_gradients(before, gradients(twin, plain_loss, given), 1e-5)
    assert len(calls) == 3


def test_with_recomputation(calls):
    model, given = seeded(TinyLM), tiny_batch("cpu")
    before = gradients(model, plain_loss, given)
    fixes.apply_to_model(["activation_checkpointing", "fused_attention"], model)
    same_gradients(before, gradients(model, plain_loss, given), 1e-5)
    assert len(calls) == 6


# What is not attention as the op computes it: the program's own calls are made ---------------------------


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def prefix_mask(q, k, v, padding):
    """Not causal any more: the first keys are seen by all."""
    mask = torch.ones(q.shape[2], q.shape[2]).tril()
    shown = mask[:, :4]
    shown[:] = 1
    return (q @ k.mT).masked_fill(mask == 0, -math.inf).softmax(-1) @ v


def changed_afterwards(q, k, v, padding):
    kept = scores = q @ k.mT
    scores = scores * 1.0
    kept += 1.5 * torch.arange(kept.shape[-1])
    return scores.softmax(-1) @ v + kept.softmax(-1) @ v


def view_changed(q, k, v, padding):
    scores = q @ k.mT
    flat = scores.view(-1, *scores.shape[-2:])
    flat += torch.arange(flat.shape[-1])
    return scores.softmax(-1) @ v


def looked_at(q, k, v, padding):
    weights = (q @ k.mT).softmax(-1)
    entropy = -(weights * weights.log()).sum()
    assert len(weights) == 3
    assert weights.ndim == 4
    return (weights @ v) * (1 + entropy)


def filled(scores, padding, value):
    return scores.masked_fill(~padding[:, None, None], value)


OWN = {
    "dropout": lambda q, k, v, padding: F.dropout((q @ k.mT).softmax(-1), 0.3) @ v,
    "talking heads": lambda q, k, v, padding: (
        (q @ k.mT).transpose(1, 2).cumsum(1).transpose(1, 2).softmax(-1) @ v
    ),
    "softmax over queries": lambda q, k, v, padding: (q @ k.mT).softmax(dim=2) @ v,
    "soft cap": lambda q, k, v, padding: (torch.tanh(q @ k.mT / 5) * 5).softmax(-1) @ v,
    "no softmax": lambda q, k, v, padding: (q @ k.mT) @ v,
    "small fill": lambda q, k, v, padding: filled(q @ k.mT, padding, -3.0).softmax(-1) @ v,
    "bias after a finite fill": lambda q, k, v, padding: (
        (filled(q @ k.mT, padding, -1e9) + torch.arange(13)).softmax(-1) @ v
    ),
    "autograd function": lambda q, k, v, padding: _Doubled.apply(q @ k.mT).softmax(-1) @ v,
    "five dimensions": lambda q, k, v, padding: (
        (q[:, :, None] @ k[:, :, None].mT).softmax(-1) @ v[:, :, None]
    )[:, :, 0],
    "learned temperature": lambda q, k, v, padding: (
        (q @ k.mT * q.mean((-1, -2), keepdim=True)).softmax(-1) @ v
    ),
    "weights set to zero": lambda q, k, v, padding: (
        filled(filled(q @ k.mT, padding, -1e9).softmax(-1), padding, 0.0) @ v
    ),
    "two fill values": lambda q, k, v, padding: (
        filled((q @ k.mT).masked_fill(torch.ones(13, 13).triu(1) > 0, -math.inf), padding, -1e9).softmax(-1)
        @ v
    ),
    "prefix mask": prefix_mask,
    "changed afterwards": changed_afterwards,
    "view changed": view_changed,
    "weights read": looked_at,
}


class Own(Style):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x, padding):
        return self.joined(self.attend(*self.heads_of(x), padding))


@pytest.mark.filterwarnings("ignore:fix 'fused_attention'")
@pytest.mark.parametrize("name", OWN)
def test_anything_else_is_computed_as_it_is_written(name):
    model, given = seeded(lambda: Own(OWN[name])).double(), batch()
    torch.manual_seed(3)
    before = gradients(model, loss, given)
    fixes.apply_to_model(FixUse("fused_attention", {"modules": [""]}), model)
    torch.manual_seed(3)
    same_gradients(before, gradients(model, loss, given), 1e-11)


def test_what_is_not_fused_is_reported_with_its_line_and_the_call_to_use():
    model = seeded(lambda: Own(OWN["soft cap"])).double()
    fixes.apply_to_model(FixUse("fused_attention", {"modules": [""]}), model)
    with pytest.warns(UserWarning, match=r"test_fused_attention\.py:\d+: tanh .*oomph\.ops\.attention\("):
        loss(model, batch())


def test_a_query_that_is_written_before_the_softmax_is_an_error():
    def attend(q, k, v, padding):
        scores = q.detach() @ k.mT
        q.detach().mul_(2)
        return scores.softmax(-1) @ v

    model = seeded(lambda: Own(attend)).double()
    fixes.apply_to_model("fused_attention", model)
    with pytest.raises(UserError, match="changed in place"):
        loss(model, batch())


def test_weights_that_were_kept_can_be_read_later_unless_their_source_changed():
    model, given = seeded(Annotated).double(), batch()
    loss(model, given)
    wanted = model.attn.detach()
    fixes.apply_to_model("fused_attention", model)
    loss(model, given)
    torch.testing.assert_close(model.attn.detach(), wanted)

    class Biased(Annotated):
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


def test_it_is_proposed_with_its_modules_and_saves_the_weights():
    work = workload(layers=3, width=64, heads=4, longest=2048)
    work = oomph.Workload(work.model, lambda device: tiny_batch(device, 4, 512), work.loss, dtype="bfloat16")
    prediction = oomph.predict(work, gpu="h200")
    (proposal,) = fixes.propose(prediction, work, only=("fused_attention",))
    assert proposal.where == tuple(f"blocks.{i}.attention" for i in range(3))
    assert proposal.slowdown < 1
    after = oomph.predict(oomph.apply(proposal, work), gpu="h200")
    weights = 3 * 4 * 4 * 512 * 512 * 2
    assert prediction.peak.allocated - after.peak.allocated > weights
    assert not [one for one in after.allocations if one.shape[-2:] == (512, 512) and one.saved]
    assert list(fixes.find("fused_attention").targets(FixContext(after, oomph.apply(proposal, work)))) == []


@pytest.mark.parametrize(
    "build",
    [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH)), lambda: Own(OWN["dropout"])],
    ids=["no attention", "dropout"],
)
def test_it_is_not_proposed_where_it_would_not_help(build):
    def run(model, given):
        out = model(given["x"]) if isinstance(model, nn.Sequential) else loss(model, given)
        return out.sum()

    def on(device):
        return {name: value.to(device) for name, value in batch(torch.float32).items()}

    work = oomph.Workload(lambda: seeded(build), on, run)
    assert fixes.propose(oomph.predict(work, gpu="h200"), work, only=("fused_attention",)) == []


def test_invalid_options_are_reported_and_change_nothing():
    model = seeded(TinyLM)
    state = state_of(model)
    with pytest.raises(UserError, match="'blocks' is a ModuleList, which has no forward"):
        fixes.apply_to_model(FixUse("fused_attention", {"modules": "blocks"}), model)
    modules = ["blocks.0.attention", "blocks.9"]
    with pytest.raises(UserError, match=r"has no module 'blocks\.9'"):
        fixes.apply_to_model(FixUse("fused_attention", {"modules": modules}), model)
    with pytest.raises(UserError, match="the model has no code of its own"):
        fixes.apply_to_model("fused_attention", nn.Linear(2, 2))
    assert state_of(model) == state


# Programs of random steps between q k^T and the product with v ------------------------------------------

B, H, T, D = 2, 3, 5, 4
FILLS = (-math.inf, -1e9, -1e9, -2.0)
BIASES = ((H, T, 1), (1, H, T, 1), (B, 1, 1, 1), (T, 1), (1,), (H, 1, 1))  # the last is the number of keys


class Program:
    """One way from q, k and v to the result; `describe()` tells it when it goes wrong."""

    def __init__(self, seed):
        chance = random.Random(seed)
        self.made = torch.Generator().manual_seed(seed)
        self.keys = chance.choice((T, T, T, 7))
        self.product = chance.choice(("matmul", "matmul", "einsum", "einsum", "bmm"))
        fills = FILLS if chance.random() < 0.2 else [chance.choice(FILLS)]  # mostly one for all masks
        self.steps = [
            (chance.choice(sorted(self.STEPS)), chance.choice(fills)) for _ in range(chance.randint(0, 5))
        ]
        self.dim = chance.choice((-1, -1, -1, -1, 3, 2))
        self.last = chance.choice(("", "", "", "masked", "dropout", "read"))
        heads = 1 if chance.random() < 0.2 else H
        bias = chance.choice(BIASES)
        shapes = ((B, H, T, D), (B, heads, self.keys, D), (B, heads, self.keys, D), (*bias[:-1], self.keys))
        self.arguments = [self.random(*shape).requires_grad_() for shape in shapes]
        self.padding = torch.rand(B, 1, 1, self.keys, generator=self.made) < 0.3
        self.pairs = torch.rand(B, 1, T, self.keys, generator=self.made) < 0.4
        if chance.random() < 0.3:
            self.padding[0] = True  # a sequence of nothing but padding
            self.pairs[0, 0, 1] = True  # a query that sees nothing
        self.weight = self.random(B, H, T, D)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.made, dtype=torch.float64)

    def describe(self):
        return f"{self.product} {self.steps} {self.dim} {self.last} {self.keys}"

    def scores(self, q, k):
        if self.product == "einsum":
            return torch.einsum("bhqd,bhkd->bhqk", q, k.expand(B, H, self.keys, D))
        if self.product == "bmm":
            k = k.expand(B, H, self.keys, D).reshape(B * H, self.keys, D)
            return torch.bmm(q.reshape(B * H, T, D), k.transpose(1, 2)).view(B, H, T, self.keys)
        return q @ k.transpose(-1, -2)

    def future(self):
        return torch.ones(T, self.keys, dtype=torch.bool).tril(self.keys - T)

    def added_future(self, fill):
        return torch.full((T, self.keys), fill, dtype=torch.float64).triu(self.keys - T + 1)

    STEPS = {  # noqa: RUF012
        "scale": lambda self, s, bias, fill: s * 0.5,
        "divide": lambda self, s, bias, fill: s / math.sqrt(D),
        "temperature": lambda self, s, bias, fill: s * torch.full((H, 1, 1), 1.3, dtype=torch.float64),
        "bias": lambda self, s, bias, fill: s + bias,
        "future": lambda self, s, bias, fill: s.masked_fill(~self.future(), fill),
        "added future": lambda self, s, bias, fill: s + self.added_future(fill),
        "padding": lambda self, s, bias, fill: s.masked_fill(self.padding, fill),
        "pairs": lambda self, s, bias, fill: torch.masked_fill(s, self.pairs, fill),
        "where": lambda self, s, bias, fill: torch.where(self.pairs, s, torch.tensor(fill).double()),
        "padding in place": lambda self, s, bias, fill: s.masked_fill_(self.padding, fill),
        "bias in place": lambda self, s, bias, fill: s.add_(bias),
        "scale in place": lambda self, s, bias, fill: s.mul_(0.7),
        "view": lambda self, s, bias, fill: s.reshape(B * H, T, -1).view(B, H, T, -1),
    }

    def __call__(self, q, k, v, bias):
        scores = self.scores(q, k)
        kept = None
        for number, (step, fill) in enumerate(self.steps):
            if number == 1:
                kept = scores  # another name for it: sees what is changed in place
            scores = self.STEPS[step](self, scores, bias, fill)
        weights = scores.softmax(self.dim)
        if self.last == "masked":
            weights = weights.masked_fill(self.padding, 0.0)
        if self.last == "dropout":
            weights = F.dropout(weights, 0.0)
        out = weights @ v
        if self.last == "read":
            out = out * weights.sum()
        return out if kept is None else out + kept.softmax(-1) @ v

    def run(self, *around):
        out = around[0](self, *self.arguments) if around else self(*self.arguments)
        grads = torch.autograd.grad((out * self.weight).sum(), self.arguments, allow_unused=True)
        return [out.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


@pytest.mark.filterwarnings("ignore:fix 'fused_attention'")
@pytest.mark.parametrize("first", range(0, 200, 100))
def test_a_program_computes_the_same_with_the_fix(first, monkeypatch):
    fused, attention = [], fused_attention.attention
    monkeypatch.setattr(
        fused_attention, "attention", lambda *args, **kwargs: (fused.append(1), attention(*args, **kwargs))[1]
    )
    for seed in range(first, first + 100):
        program = Program(seed)
        wanted = program.run()
        if any(tensor.isnan().any() for tensor in wanted):
            continue  # a query without keys, and -inf: the program is ill, the op gives zeros
        for one, other in zip(program.run(in_mode(AttentionMode)), wanted, strict=True):
            torch.testing.assert_close(
                one, other.expand_as(one), rtol=1e-8, atol=1e-8, msg=f"{seed}: {program.describe()}"
            )
    assert len(fused) > 30, len(fused)
