"""Logits that are not there: whatever reads them gets what the head would have given."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES, prepared, same_pass
from heads import CLASSES, FIX, ROWS, WAYS, Model, batch_of, compare, fixed
from small import gradients, seeded
from torch.utils.checkpoint import checkpoint

from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.lazy_tensor import LazyTensor
from oomph.records import FixUse

USES = {
    "argmax": lambda z: z.argmax(-1),
    "softmax": lambda z: torch.softmax(z, -1),
    "detach": lambda z: z.detach(),
    "cpu": lambda z: z.cpu(),
    "clone": lambda z: z.clone(),
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "item": lambda z: torch.tensor(z[0, 0, 0].item()),
    "tolist": lambda z: torch.tensor(z.tolist()),
    "plus": lambda z: z + 1,
    "compared": lambda z: z > 0,
    "product": lambda z: z @ torch.ones(CLASSES, 2),
    "double": lambda z: z.double(),
    "bfloat16": lambda z: z.to(torch.bfloat16),
    "class slice": lambda z: z[..., 3],
    "iterated": lambda z: torch.stack(list(z)),
    "unbound": lambda z: torch.stack(z.unbind(1)),
    "topk": lambda z: z.topk(2).values,
    "view as": lambda z: z.view(ROWS, -1),
    "strides": lambda z: torch.tensor(z.stride()),
    "contiguous": lambda z: torch.tensor(z.is_contiguous()),
    "printed": lambda z: torch.tensor(list(repr(z).encode())),
    "formatted": lambda z: torch.tensor(list(f"{z.mean():.4f}".encode())),
    "data": lambda z: z.data,
    "in a list": lambda z: torch.cat([z, z[:1]]),
    "out": lambda z: torch.exp(z, out=torch.empty(0)),
}


@pytest.mark.parametrize(
    ("use", "grad"),
    [
        (use, grad) for use in USES for grad in (True, False) if (use, grad) != ("out", True)
    ],  # no autograd there
)
def test_reading_gives_what_the_head_would_have_given(use, grad):
    model, (x, _) = seeded(lambda: Model(dtype=torch.float32)), batch_of(torch.float32)
    with torch.set_grad_enabled(grad):
        expected = USES[use](model(x))
        fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {"heads": ["head"]}), model)
        found = USES[use](model(x))
    assert type(found) is torch.Tensor
    assert found.requires_grad == expected.requires_grad
    if use != "printed" or not grad:
        assert torch.equal(found, expected)


def test_logits_can_be_copied_and_saved():
    model, (x, _) = fixed(), batch_of(torch.float32)
    with torch.no_grad():
        logits = model(x)
        assert torch.equal(copy.deepcopy(logits), logits.clone())
        file = io.BytesIO()
        torch.save(logits, file)
        file.seek(0)
        assert torch.equal(torch.load(file), logits.clone())


def test_hooks_and_retained_gradients_of_logits():
    x, y = batch_of()

    def gradient_of_logits(model, how):
        logits, seen = model(x), []
        if how == "hook":
            logits.register_hook(lambda grad: seen.append(grad))
        else:
            logits.retain_grad()
        F.cross_entropy(logits.mT, y).backward()
        return seen[0] if seen else logits.grad

    model = seeded(Model)
    expected = gradient_of_logits(model, "hook")
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {"heads": ["head"]}), model)
    for how in ("hook", "retain"):
        torch.testing.assert_close(gradient_of_logits(model, how), expected)


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
    same_pass(before, after, 2e-2)


def test_autocast_of_logits_that_are_read_after_the_region():
    model, (x, _) = seeded(lambda: Model(dtype=torch.float32)), batch_of(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {"heads": ["head"]}), model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    assert torch.equal(logits + 0, expected)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        logits = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert logits.clone().dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["view", "scaled and capped"])
def test_the_head_at_the_end_of_a_checkpoint(reentrant, way):
    model, (x, y) = seeded(Model), batch_of()
    x.requires_grad_()

    def loss(model, _):
        return WAYS[way](checkpoint(model, x, use_reentrant=reentrant), y)

    before = gradients(model, loss, None)
    fixes.apply_to_model(FixUse("fused_linear_cross_entropy", {**FIX.options, "heads": ["head"]}), model)
    same_pass(before, gradients(model, loss, None), 1e-9)


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
    same_pass(before, gradients(model, loss, None), 1e-9)
    torch.testing.assert_close(seen[1], seen[0])


def test_no_target_at_all_is_nan_as_before_and_has_no_gradient():
    model, (x, y) = fixed(), batch_of(torch.float32)
    loss = F.cross_entropy(model(x).mT, torch.full_like(y, -100))
    loss.backward()
    assert loss.isnan()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_mistakes_in_the_loss_are_told_by_torch():
    model, (x, y) = fixed(), batch_of(torch.float32)
    with pytest.raises(RuntimeError, match="Expected target size"):
        F.cross_entropy(model(x).mT, y[:, :2])
    with pytest.raises(RuntimeError, match=r"but got Int|expected scalar type"):
        F.cross_entropy(model(x).mT, y.int())
    with pytest.raises(ValueError, match="reduction"):
        F.cross_entropy(model(x).mT, y, reduction="mode")


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


def test_a_copy_of_the_model_uses_its_own_weights():
    model, (x, y) = fixed(), batch_of(torch.float32)
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(x).mT, y).backward()
    assert model.head.weight.grad is None
    assert twin.head.weight.grad is not None


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
