"""The loss without its logits: the same gradients, however the loss is written; where it is proposed."""

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, prepared, same_pass
from heads import CLASSES, FIX, LENGTH, ROWS, WAYS, Largest, Model, batch_of, compare, fixed
from small import TinyLM, gradients, plain_loss, seeded, state_of, tiny_batch

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.lazy_tensor import LazyTensor
from oomph.records import FixUse

LANGUAGE_MODELS = [name for name in ARCHITECTURES if name not in ("ViT", "Classifier")]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_gradients_are_the_same_without_logits_and_undo_restores_the_model(name):
    workload = ARCHITECTURES[name]()
    model, batch = prepared(workload)
    before, state = gradients(model, workload.loss, batch), state_of(model)
    fixes.apply_to_model(FIX, model)
    made = []
    head = next(module for module in model.modules() if "forward" in vars(module))
    hook = head.register_forward_hook(lambda module, args, out: made.append(out))
    same_pass(before, gradients(model, workload.loss, batch))
    assert made
    assert not any(logits.expression.computed for logits in made)
    hook.remove()
    fixes.undo(model)
    assert state_of(model) == state


# These need the logits: they must come out the same, by the logits.
READING = {
    "class probabilities": lambda z, y: F.cross_entropy(
        z.view(-1, CLASSES), torch.softmax(z.detach(), -1)[:].view(-1, CLASSES)
    ),
    "gather": lambda z, y: -z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).mean(),
    "part of the classes": lambda z, y: F.cross_entropy(z[..., :20].flatten(0, 1), y.flatten() % 20),
    "with z-loss": lambda z, y: F.cross_entropy(z.mT, y) + z.logsumexp(-1).square().mean(),
    "sum": lambda z, y: z.sum(),
    "in-place": lambda z, y: F.cross_entropy(z.mul_(2).mT, y),
    "augmented": lambda z, y: F.cross_entropy(_halved(z).mT, y),
    "masked in place": lambda z, y: F.cross_entropy(_masked(z).mT, y),
    "a copy before writing": lambda z, y: _copied_before_writing(z, y),
    "a view before writing": lambda z, y: _viewed_before_writing(z, y),
    "learned scale": lambda z, y: F.cross_entropy((z * torch.tensor(1.5)).mT, y),
    "other logits": lambda z, y: F.mse_loss(z, z * 2),
    "stacked": lambda z, y: F.cross_entropy(torch.cat([z, z]).mT, torch.cat([y, y])),
    "chosen with their mean": lambda z, y: F.cross_entropy(z.mT, y).where(torch.tensor(True), z.mean()),
    "double tanh": lambda z, y: F.cross_entropy(z.tanh().tanh().mT, y),
    "read first": lambda z, y: F.cross_entropy(z.mT, y) if z.argmax().item() >= 0 else None,
    "einsum": lambda z, y: torch.einsum("btv,btv->", z, z),
    "numpy": lambda z, y: F.cross_entropy(z.mT, y) * float(z.detach().numpy().max()),
}


def _halved(z):
    z /= 2
    return z


def _masked(z):
    z[:, :, 5:9] = float("-inf")
    return z.masked_fill(torch.isneginf(z), -1e4)


def _copied_before_writing(z, y):
    scaled = z * 2
    z.zero_()
    return F.cross_entropy(scaled.mT, y)


def _viewed_before_writing(z, y):
    flat = z.view(-1, CLASSES)
    z.mul_(3)
    return F.cross_entropy(flat, y.view(-1))


@pytest.mark.parametrize("way", WAYS)
def test_the_ways_a_loss_is_written_need_no_logits(way):
    assert compare(WAYS[way])


def test_a_head_without_a_bias():
    assert compare(WAYS["view"], bias=False)


@pytest.mark.parametrize("way", READING)
def test_whatever_reads_the_logits_gets_them(way):
    assert not compare(READING[way])


def test_scaling_a_biased_head_scales_its_bias():
    assert compare(lambda z, y: F.cross_entropy((z * 3.0).mT, y), bias=True)


def test_no_tensor_as_large_as_the_logits_is_made():
    model = seeded(lambda: TinyLM(vocabulary=4001, width=16, layers=1))
    batch = tiny_batch("cpu", 4, 64, 4001)
    sizes = {}
    for fix in (None, FixUse("fused_linear_cross_entropy", {"memory_budget": "64KiB"})):
        if fix is not None:
            fixes.apply_to_model(fix, model)
        with Largest() as seen:
            gradients(model, plain_loss, batch)
        sizes[fix is None] = seen.numbers
    assert sizes[True] == 4 * 64 * 4001
    assert 4001 * 16 <= sizes[False] < sizes[True] / 10  # of the weight's gradient, or of a block


def test_questions_are_answered_without_computing():
    model, (x, _) = fixed(), batch_of(torch.float32)
    logits = model(x)
    assert isinstance(logits, LazyTensor)
    assert isinstance(logits, torch.Tensor)
    assert logits.shape == (ROWS, LENGTH, CLASSES)
    assert logits.size(-1) == logits.size()[2] == CLASSES
    assert (logits.dim(), logits.ndim, len(logits), logits.numel()) == (3, 3, ROWS, ROWS * LENGTH * CLASSES)
    assert (logits.dtype, logits.device, logits.is_cuda) == (torch.float32, x.device, False)
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.is_floating_point()
    assert not logits.expression.computed


def test_it_is_proposed_where_logits_are_large_and_lowers_the_peak():
    def workload(vocabulary, **options):
        return oomph.Workload(
            lambda: TinyLM(vocabulary=vocabulary, layers=1),
            lambda device: tiny_batch(device, 32, 64, vocabulary),
            plain_loss,
            **options,
        )

    fix = fixes.find("fused_linear_cross_entropy")
    for options in ({}, {"autocast": "bfloat16"}):
        work = workload(16000, **options)
        (proposal,) = fixes.propose(oomph.predict(work, gpu="h200"), work, only=(fix.name,))
        assert proposal.where == ("head",)
        assert proposal.saving > 2048 * 16000 * 4
    work = fixes.apply(proposal, work)
    after = oomph.predict(work, gpu="h200")
    assert not any(made.op == "aten._log_softmax" for made in after.allocations)
    assert not fixes.propose(after, work, only=(fix.name,))
    small = workload(97)
    assert not fixes.propose(oomph.predict(small, gpu="h200"), small, only=(fix.name,))


@pytest.mark.parametrize("name", ["Gemma-2", "BERT", "T5", "RotaryLM"])
def test_predictions_run_it(name):
    workload = ARCHITECTURES[name]()
    after = oomph.predict(fixes.apply(FIX, workload), gpu="h200")
    assert not any(made.op in ("aten._log_softmax", "aten.nll_loss_forward") for made in after.allocations)


def test_a_prediction_computes_logits_that_are_read():
    def loss(model, batch):
        logits = model(batch["tokens"])
        assert logits.device.type == "cuda"
        return plain_loss(lambda _: logits, batch) + logits.logsumexp(-1).mean()

    work = oomph.Workload(lambda: TinyLM(), tiny_batch, loss)
    plain, fixed = (oomph.predict(one, gpu="h200") for one in (work, fixes.apply(FIX, work)))
    shapes = [
        sorted(made.shape for made in one.allocations if made.shape[-1:] == (97,) and made.step == 2)
        for one in (plain, fixed)
    ]
    assert (4, 24, 97) in shapes[1] or (96, 97) in shapes[1]


def test_mistakes_are_told_and_change_nothing():
    model = seeded(TinyLM)
    state = state_of(model)

    def refused(match, **options):
        with pytest.raises(UserError, match=match):
            fixes.apply_to_model(FixUse("fused_linear_cross_entropy", options), model)
        assert state_of(model) == state

    refused(r"has no module 'lm_head'", heads=["lm_head"])
    refused(r"heads=5 is not valid; give a list", heads=5)
    refused(r"heads=\[\] is not valid; give a list", heads=[])
    refused(r"'embed' is a Embedding, or its weight is computed", heads=["head", "embed"])
    refused(r"memory_budget='much'", memory_budget="much")
    refused(r"has no option 'head'", head="head")
    with pytest.raises(UserError, match="no linear head as wide as its vocabulary"):
        fixes.apply_to_model("fused_linear_cross_entropy", Model())
    handle = model.head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UserError, match="'head' has backward hooks"):
        fixes.apply_to_model("fused_linear_cross_entropy", model)
    handle.remove()
    model.head.forward = model.head.forward
    with pytest.raises(UserError, match="forward of 'head' is replaced already"):
        fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {"heads": ["head"]}), model)
