"""The fused head and loss: the same gradients however the loss is written; logits for what reads them."""

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, prepared
from small import TinyLM, gradients, plain_loss, same_pass, seeded, tiny_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.lazy_tensor import LazyTensor
from oomph.records import FixUse

# A budget that no logits fit into, so that the tiny ones of these tests are taken for large.
FIX = FixUse("fused_linear_cross_entropy", {"memory_budget": "1KiB"})


ROWS, LENGTH, WIDTH, CLASSES = 3, 7, 8, 33


class Model(nn.Module):
    """A head, and something before it."""

    def __init__(self, bias=True, dtype=torch.float64):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def batch_of(dtype=torch.float64):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=made, dtype=dtype)
    y = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=made)
    y[0, :2] = -100
    return x, y


def compare(loss, dtype=torch.float64, tolerance=1e-9, bias=True):
    """The pass with and without the fix; True if the logits were not computed."""
    model, (x, y) = seeded(lambda: Model(bias, dtype)), batch_of(dtype)
    before = gradients(model, lambda model, _: loss(model(x), y), None)
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {**FIX.options, "heads": ["head"]}), model)
    made = []

    def keeping(model, _):
        made.append(model(x))
        return loss(made[0], y)

    same_pass(before, gradients(model, keeping, None), tolerance=tolerance)
    return not made[0].expression.computed


def fixed(dtype=torch.float32):
    model = seeded(lambda: Model(dtype=dtype))
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {**FIX.options, "heads": ["head"]}), model)
    return model


# The ways a loss is written.
WAYS = {
    "view": lambda z, y: F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1)),
    "module": lambda z, y: nn.CrossEntropyLoss(ignore_index=3)(z.view(-1, CLASSES), y.view(-1).clamp(min=0)),
    "sum": lambda z, y: F.cross_entropy(z.view(-1, CLASSES), y.view(-1), reduction="sum") / 5,
    "per token": lambda z, y: (
        F.cross_entropy(z.view(-1, CLASSES), y.view(-1), reduction="none") * torch.arange(21)
    ).sum(),
    "label smoothing": lambda z, y: F.cross_entropy(z.view(-1, CLASSES), y.view(-1), label_smoothing=0.2),
    "class weights": lambda z, y: F.cross_entropy(
        z.view(-1, CLASSES), y.view(-1), weight=torch.linspace(0.5, 2, CLASSES, dtype=z.dtype)
    ),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "mT": lambda z, y: F.cross_entropy(z.mT, y),
    "batch second": lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1)),
    "shift": lambda z, y: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].contiguous().view(-1)
    ),
    "last tokens": lambda z, y: F.cross_entropy(z[:, -3:].flatten(0, 1), y[:, -3:].flatten()),
    "masked": lambda z, y: F.cross_entropy(z[y != -100], y[y != -100]),
    "picked": lambda z, y: F.cross_entropy(z[torch.arange(3), torch.tensor([2, 3, 4])], y[:, 4]),
    "scaled": lambda z, y: F.cross_entropy((z * 0.25 / 3).mT, y),
    "capped": lambda z, y: F.cross_entropy((torch.tanh(z / 1.7) * 1.7).view(-1, CLASSES), y.view(-1)),
    "scaled and capped": lambda z, y: F.cross_entropy((0.9 * (z * 3 / 1.7).tanh()).mT, y),
    "nll": lambda z, y: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, CLASSES), y.view(-1)),
    "nll of classes second": lambda z, y: nn.NLLLoss()(z.transpose(1, 2).log_softmax(1), y),
    "gather": lambda z, y: -z.log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).mean(),
    "gather of classes second": lambda z, y: z.mT.log_softmax(1).gather(1, y.clamp(min=0)[:, None]).sum(),
}


# These need the logits: they must come out the same, by the logits.
READING = {
    "class probabilities": lambda z, y: F.cross_entropy(
        z.view(-1, CLASSES), torch.softmax(z.detach(), -1)[:].view(-1, CLASSES)
    ),
    "gather without softmax": lambda z, y: z.gather(-1, y.clamp(min=0).unsqueeze(-1)).mean(),
    "part of the classes": lambda z, y: F.cross_entropy(z[..., :20].flatten(0, 1), y.flatten() % 20),
    "with z-loss": lambda z, y: F.cross_entropy(z.mT, y) + z.logsumexp(-1).square().mean(),
    "augmented": lambda z, y: F.cross_entropy(_halved(z).mT, y),
    "a copy before writing": lambda z, y: _copied_before_writing(z, y),
    "a view before writing": lambda z, y: _viewed_before_writing(z, y),
    "learned scale": lambda z, y: F.cross_entropy((z * torch.tensor(1.5)).mT, y),
    "double tanh": lambda z, y: F.cross_entropy(z.tanh().tanh().mT, y),
    "read first": lambda z, y: F.cross_entropy(z.mT, y) if z.argmax().item() >= 0 else None,
}


def _halved(z):
    z /= 2
    return z


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


@pytest.mark.parametrize("way", READING)
def test_whatever_reads_the_logits_gets_them(way):
    assert not compare(READING[way])


def test_questions_are_answered_without_computing():
    model, (x, _) = fixed(), batch_of(torch.float32)
    logits = model(x)
    assert isinstance(logits, LazyTensor)
    assert (logits.shape, logits.size(-1), len(logits)) == ((ROWS, LENGTH, CLASSES), CLASSES, ROWS)
    assert (logits.dtype, logits.device, logits.is_cuda) == (torch.float32, x.device, False)
    assert logits.requires_grad
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


def test_invalid_options_are_reported_and_change_nothing():
    model = seeded(TinyLM)
    handle = model.head.register_full_backward_hook(lambda *_: None)
    with pytest.raises(UserError, match="'head' has backward hooks"):
        fixes.apply_to_model("fused_linear_cross_entropy", model)
    handle.remove()
    model.head.forward = model.head.forward
    with pytest.raises(UserError, match="forward of 'head' is replaced already"):
        fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {"heads": ["head"]}), model)


# Logits that something reads ----------------------------------------------------------------------------

USES = {
    "argmax": lambda z: z.argmax(-1),
    "cpu": lambda z: z.cpu(),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "item": lambda z: torch.tensor(z[0, 0, 0].item()),
    "class slice": lambda z: z[..., 3],
    "printed": lambda z: torch.tensor(list(repr(z).encode())),
    "out": lambda z: torch.exp(z, out=torch.empty(0)),
}


@pytest.mark.parametrize("use", USES)
def test_reading_gives_what_the_head_would_have_given(use):
    for grad in (True, False) if use != "out" else (False,):  # out= has no autograd
        _check_reading(use, grad)


def _check_reading(use, grad):
    model, (x, _) = seeded(lambda: Model(dtype=torch.float32)), batch_of(torch.float32)
    with torch.set_grad_enabled(grad):
        expected = USES[use](model(x))
        fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {"heads": ["head"]}), model)
        found = USES[use](model(x))
    assert type(found) is torch.Tensor
    assert found.requires_grad == expected.requires_grad
    if use != "printed" or not grad:
        assert torch.equal(found, expected)


def test_evaluation_needs_no_logits_either_and_inference_mode_gets_them():
    model, (x, y) = fixed(), batch_of(torch.float32)
    with torch.no_grad():
        logits = model(x)
        loss = F.cross_entropy(logits.mT, y)
        assert not logits.expression.computed
        assert not loss.requires_grad
    # Made without gradients, they have none later either.
    assert not F.cross_entropy(logits.mT, y).requires_grad
    assert not F.cross_entropy(logits.detach().mT, y).requires_grad
    with torch.inference_mode():
        assert type(model(x)) is torch.Tensor


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_autocast_gives_the_head_its_dtype(inside, wide):
    """The loss may be computed inside the region, or after it, from bf16 or fp32 logits."""
    model, (x, y) = seeded(lambda: Model(dtype=torch.float32)), batch_of(torch.float32)

    def loss(model, _):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
            assert logits.dtype == torch.bfloat16
            if inside:
                return F.cross_entropy((logits.float() if wide else logits).mT, y)
        return F.cross_entropy((logits.float() if wide else logits).mT, y)

    before = gradients(model, loss, None)
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {**FIX.options, "heads": ["head"]}), model)
    after = gradients(model, loss, None)
    assert after[0].dtype == before[0].dtype
    same_pass(before, after, tolerance=2e-2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["view", "scaled and capped"])
def test_the_head_at_the_end_of_a_checkpoint(reentrant, way):
    model, (x, y) = seeded(Model), batch_of()
    x.requires_grad_()

    def loss(model, _):
        return WAYS[way](checkpoint(model, x, use_reentrant=reentrant), y)

    before = gradients(model, loss, None)
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {**FIX.options, "heads": ["head"]}), model)
    same_pass(before, gradients(model, loss, None), tolerance=1e-9)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("reader", [lambda z: Doubled.apply(z), lambda z: Doubled.apply(z[:, 1:] * 3)])
def test_code_that_never_asks_the_tensor_gets_values_and_gradients(reader):
    compare(lambda z, y: F.cross_entropy(reader(z).flatten(0, 1), y[:, -reader(z).shape[1] :].flatten()))


def test_full_backward_hooks_of_the_model_see_their_gradients():
    model, (x, y) = seeded(Model), batch_of()
    x.requires_grad_()
    seen = []
    model.register_full_backward_hook(lambda module, into, out: seen.append(out[0].clone()))

    def loss(model, _):
        return F.cross_entropy(model(x).mT, y)

    before = gradients(model, loss, None)
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {"heads": ["head"]}), model)
    same_pass(before, gradients(model, loss, None), tolerance=1e-9)
    torch.testing.assert_close(seen[1], seen[0])


def test_no_target_at_all_is_nan_as_before_and_has_no_gradient():
    model, (x, y) = fixed(), batch_of(torch.float32)
    loss = F.cross_entropy(model(x).mT, torch.full_like(y, -100))
    loss.backward()
    assert loss.isnan()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_errors_in_the_loss_are_reported_by_torch():
    model, (x, y) = fixed(), batch_of(torch.float32)
    with pytest.raises(RuntimeError, match="Expected target size"):
        F.cross_entropy(model(x).mT, y[:, :2])
    with pytest.raises(RuntimeError, match=r"but got Int|expected scalar type"):
        F.cross_entropy(model(x).mT, y.int())
    with pytest.raises(ValueError, match="reduction"):
        F.cross_entropy(model(x).mT, y, reduction="mode")


def test_gather_ignores_no_index_and_keeps_the_dtype():
    model, (x, y) = fixed(torch.bfloat16), batch_of(torch.bfloat16)
    chosen = y.clamp(min=0)[..., None]
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        log_probabilities = model(x).log_softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        assert log_probabilities.gather(-1, chosen).dtype == torch.bfloat16
    assert torch.equal(log_probabilities.gather(-1, y[..., None]).isnan(), y[..., None] == -100)
    with torch.no_grad():
        out = torch.gather(log_probabilities, -1, chosen, out=torch.empty(ROWS, LENGTH, 1).bfloat16())
    assert out.isfinite().all()


def test_logits_read_after_the_update_say_so():
    model, (x, y) = fixed(), batch_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits = model(x)
    F.cross_entropy(logits.mT, y).backward()
    read_before = model(x).argmax(-1)
    assert torch.equal(read_before, logits.argmax(-1))  # before the update all is well
    logits = model(x)
    optimizer.step()
    with pytest.raises(UserError, match="was changed in place"):
        logits.argmax(-1)


def test_an_output_of_hugging_face_keeps_its_fields():
    workload = ARCHITECTURES["Gemma-2"]()
    model, batch = prepared(workload)
    before = model(**batch)
    fixes.apply_to_model(FIX, model)
    after = model(**batch)
    assert isinstance(after.logits, LazyTensor)
    assert after[1] is after.logits
    torch.testing.assert_close(after.loss, before.loss)
    torch.testing.assert_close(after.logits + 0, before.logits)
    without_labels = model(input_ids=batch["input_ids"])
    assert torch.equal(without_labels.logits.argmax(-1), before.logits.argmax(-1))
    counted = model(**batch, num_items_in_batch=torch.tensor(7))
    torch.testing.assert_close(counted.loss, before.loss * (batch["labels"][:, 1:] != -100).sum() / 7)


def test_compiled_and_transformed_models_get_plain_logits():
    model, (x, _) = fixed(), batch_of(torch.float32)
    parameters = dict(model.named_parameters())

    def total(parameters):
        logits = torch.func.functional_call(model, parameters, (x,))
        assert type(logits) is torch.Tensor
        return logits.sum()

    assert set(torch.func.grad(total)(parameters)) == set(parameters)
    compiled = torch.compile(model, backend="eager")
    assert type(compiled(x)) is torch.Tensor


def test_logits_that_are_read_after_autocast_are_those_of_inside():
    x, _ = batch_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        right, logits = seeded(lambda: Model(dtype=x.dtype))(x), fixed()(x)
    assert logits.dtype == right.dtype == torch.bfloat16
    assert torch.equal(logits.clone(), right)
