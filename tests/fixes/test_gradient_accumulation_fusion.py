"""Weight gradients added straight to .grad: the same sums, without a temporary of the weight's size."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, prepared
from small import TinyLM, plain_loss, same_gradients, same_pass, seeded, state_of, tiny_batch, workload
from torch import nn
from torch.utils.checkpoint import checkpoint

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes import gradient_accumulation_fusion
from oomph.fixes.registry import FixContext
from oomph.records import FixUse
from oomph.workload import MicroBatches

PASSES = 3


def summed(model, loss, batch):
    """The last loss and all gradients, summed over several passes."""
    model.zero_grad()
    for _ in range(PASSES):
        value = loss(model, batch)
        value.backward()
    return value.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def added(monkeypatch):
    """The shapes of the gradients that were added in place."""
    shapes, real = [], gradient_accumulation_fusion.matmul_into

    def matmul_into(out, *args, **options):
        shapes.append(tuple(out.shape))
        real(out, *args, **options)

    monkeypatch.setattr(gradient_accumulation_fusion, "matmul_into", matmul_into)
    return shapes


@pytest.mark.parametrize(("name", "with_fused_loss"), [("Classifier", False), ("T5", True)])
def test_gradients_are_the_same_and_undo_restores_the_model(name, with_fused_loss, added):
    work = ARCHITECTURES[name]()
    model, batch = prepared(work)
    statistics = copy.deepcopy(dict(model.named_buffers()))  # of batch norm, which follow every pass
    before, state = summed(model, work.loss, batch), state_of(model)
    for buffer_name, buffer in model.named_buffers():
        buffer.copy_(statistics[buffer_name])
    changes = fixes.apply_to_model(
        ["gradient_accumulation_fusion", *(["fused_linear_cross_entropy"] if with_fused_loss else [])], model
    )
    same_pass(before, summed(model, work.loss, batch))
    in_place = [change for change in changes if change.fix == "gradient_accumulation_fusion"]
    assert len(added) == (len(in_place) - with_fused_loss) * (PASSES - 1)
    fixes.undo(model)
    assert state_of(model) == state


def linear(dtype=torch.float32, **options):
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 16, dtype=dtype, **options), nn.Tanh()))
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    return model, x


def square(model, x):
    return model(x).float().square().mean()


def test_under_autocast_bf16_products_go_into_fp32_gradients(added):
    model, x = linear()

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
            assert out.dtype == torch.bfloat16
            return out.float().square().mean()

    before = summed(model, loss, x)
    fixes.apply_to_model("gradient_accumulation_fusion", model)
    after = summed(model, loss, x)
    assert after[1]["0.weight"].dtype == torch.float32
    same_pass(before, after, tolerance=1e-2)
    assert added


class Twice(nn.Module):
    """One weight in two layers and in an embedding, and one layer called twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 12)
        self.first, self.second = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.first.weight = self.second.weight = self.embed.weight

    def forward(self, tokens):
        return self.second(torch.tanh(self.first(torch.tanh(self.first(self.embed(tokens))))))


def test_a_weight_used_several_times_in_one_pass(added):
    model, tokens = seeded(Twice).double(), torch.arange(12).view(3, 4)
    before = summed(model, square, tokens)
    fixes.apply_to_model("gradient_accumulation_fusion", model)
    same_pass(before, summed(model, square, tokens), tolerance=1e-12)
    assert len(added) == 3 * (PASSES - 1)


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant, added):
    model, x = linear(torch.float64)
    x.requires_grad_()

    def loss(model, x):
        return checkpoint(model, x, use_reentrant=reentrant).square().mean()

    before = summed(model, loss, x)
    fixes.apply_to_model("gradient_accumulation_fusion", model)
    same_pass(before, summed(model, loss, x), tolerance=1e-12)
    assert len(added) == PASSES - 1


def test_gradients_that_are_handed_out_leave_grad_alone():
    model, x = linear(torch.float64)
    fixes.apply_to_model("gradient_accumulation_fusion", model)
    square(model, x).backward()
    weight, bias = model[0].weight, model[0].bias
    there = weight.grad.clone()
    (handed_out,) = torch.autograd.grad(square(model, x), weight)
    torch.testing.assert_close(handed_out, there)
    square(model, x).backward(inputs=[bias])
    assert torch.equal(weight.grad, there)
    square(model, x).backward(inputs=[weight])
    torch.testing.assert_close(weight.grad, 2 * there)


def test_hooks_that_come_later_are_called():
    model, x = linear()
    fixes.apply_to_model("gradient_accumulation_fusion", model)
    square(model, x).backward()
    value, seen = model[0].weight.grad.clone(), []
    model[0].weight.register_hook(lambda grad: seen.append("arrived"))
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("added"))
    square(model, x).backward()
    assert seen == ["arrived", "added"]
    torch.testing.assert_close(model[0].weight.grad, 2 * value)


def test_it_is_proposed_for_several_passes_and_saves_a_temporary():
    def with_(**options):
        made = workload(vocabulary=97, width=512, layers=1)
        return oomph.Workload(made.model, lambda device: tiny_batch(device, 4, 16), made.loss, **options)

    fix = fixes.find("gradient_accumulation_fusion")
    once = with_(optimizer=None)
    assert fix.proposals(FixContext(oomph.predict(once, gpu="h200"), once)) == []
    for several in (
        with_(optimizer=None, accumulate=2),
        with_(optimizer=None, micro_batches=MicroBatches(2), autocast="bfloat16"),
    ):
        before = oomph.predict(several, gpu="h200")
        (proposal,) = fix.proposals(FixContext(before, several))
        assert "blocks.0.mlp.fc" in proposal.where
        assert "head" not in proposal.where  # too small to matter
        # Not the temporary gradient of the largest weights, of 4 MiB.
        after = oomph.predict(oomph.apply(proposal, several), gpu="h200")
        assert after.peak.allocated <= before.peak.allocated - 2**22


def test_layers_whose_gradient_something_else_needs_are_left_out_or_refused():
    model = seeded(TinyLM)
    model.blocks[0].mlp.fc.weight.requires_grad_(False)
    model.blocks[1].mlp.fc.weight.register_hook(lambda grad: grad)
    state = state_of(model)
    for name, why in (("blocks.0.mlp.fc", "is frozen"), ("blocks.1.mlp.fc", "has hooks on its weight")):
        with pytest.raises(UserError, match=f"'{name}' {why}"):
            fixes.apply_to_model(FixUse("gradient_accumulation_fusion", {"modules": ["head", name]}), model)
        assert state_of(model) == state
    names = {change.where for change in fixes.apply_to_model("gradient_accumulation_fusion", model)}
    assert "blocks.2.mlp.fc" in names
    assert not names & {"blocks.0.mlp.fc", "blocks.1.mlp.fc"}


def test_second_derivatives_are_refused():
    model, x = linear()
    fixes.apply_to_model("gradient_accumulation_fusion", model)
    with pytest.raises(
        UserError, match=r"cannot be differentiated twice \(create_graph=True\); undo the fix"
    ):
        torch.autograd.grad(square(model, x.requires_grad_()), x, create_graph=True)


def test_a_fused_head_hands_out_gradients_and_leaves_grad_alone():
    model, batch = seeded(TinyLM), tiny_batch("cpu")
    fixes.apply_to_model(
        ["fused_linear_cross_entropy", FixUse("gradient_accumulation_fusion", {"modules": "head"})], model
    )
    plain_loss(model, batch).backward()
    weight, other = model.head.weight, model.norm.weight
    there = weight.grad.clone()
    (handed_out,) = torch.autograd.grad(plain_loss(model, batch), weight)
    torch.testing.assert_close(handed_out, there)
    assert torch.equal(weight.grad, there)
    plain_loss(model, batch).backward(inputs=[other])
    assert torch.equal(weight.grad, there)
    loss, seen = plain_loss(model, batch), []
    weight.register_hook(lambda grad: seen.append("arrived"))  # after forward
    loss.backward()
    assert seen == ["arrived"]
    torch.testing.assert_close(weight.grad, 2 * there)


class WritesResult(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        y += 1
        return y.sin_().sum()


def test_the_program_may_write_into_the_result():
    x, found = torch.randn(2, 3, 8, dtype=torch.float64), []
    for names in ([], ["gradient_accumulation_fusion"]):
        model = seeded(WritesResult).double()
        fixes.apply_to_model(names, model)
        for _ in range(2):
            loss = model(x)
            loss.backward()
        found.append((loss.detach(), {name: one.grad for name, one in model.named_parameters()}))
    same_gradients(*found, 1e-12)
