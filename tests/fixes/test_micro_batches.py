"""micro_batches: parts give the gradients of the whole batch, or the proposal states a condition."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES
from short_training import not_found, proposed
from small import same_gradients, tiny_batch, uneven, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.micro_batches import shifts_labels
from oomph.fixes.registry import FixContext
from oomph.records import FixUse


def step_gradients(work):
    """The loss of a whole step and its gradients, as the Workload says that a step goes."""
    torch.manual_seed(0)
    model = work.model().double()
    total = torch.zeros((), dtype=torch.float64)
    for part, factor in work.passes(work.make_batch(torch.device("cpu"))):
        loss = work.scaled(work.loss(model, part), factor)
        loss.backward()
        total += loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_give_the_gradients_of_the_whole(parts):
    work = replace(workload(layers=1), batch=uneven)
    fixed = fixes.apply(FixUse("micro_batches", {"parts": parts}), work)
    (loss, before), (new_loss, after) = step_gradients(work), step_gradients(fixed)
    assert fixed.micro_batches.parts == parts
    same_gradients((loss, before), (new_loss, after), 1e-12)


def with_form(form, read):
    def loss(model, batch):
        tokens, labels = read(batch)
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    return replace(workload(layers=1), batch=lambda device: form(*uneven(device).values()), loss=loss)


@pytest.mark.parametrize(
    ("options", "form", "read"),
    [
        ({}, lambda x, y: {"x": x, "y": {"labels": y}}, lambda b: (b["x"], b["y"]["labels"])),
        ({"labels": 1}, lambda x, y: (x, y), lambda b: b),
        ({"labels": "y"}, lambda x, y: [{"y": y, "x": x}], lambda b: (b[0]["x"], b[0]["y"])),
    ],
    ids=["usual name", "position", "other name"],
)
def test_labels_are_found_by_name_or_position(options, form, read):
    work = with_form(form, read)
    fixed = fixes.apply(FixUse("micro_batches", options), work)
    same_gradients(step_gradients(work), step_gradients(fixed), 1e-12)


@pytest.mark.parametrize(
    ("form", "read"),
    [(lambda x, y: (x, y), lambda b: b), (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"]))],
    ids=["tuple", "other names"],
)
def test_unnamed_labels_are_not_guessed(form, read):
    """Parts count by their rows, and the proposal says so; the labels option makes it exact."""
    work = with_form(form, read)
    fixed = fixes.apply("micro_batches:parts=3", work)
    assert [factor for _, factor in fixed.passes(work.make_batch("cpu"))] == [1 / 3] * 3
    proposals = fixes.find("micro_batches").proposals(FixContext(None, work))
    assert all("no tensor of the batch is named labels or targets" in each.condition for each in proposals)
    assert not fixes.verify("micro_batches", work).holds
    with pytest.raises(UserError, match=r"has no tensor of whole numbers.*give labels=NAME"):
        step_gradients(fixes.apply("micro_batches:weights=labels", work))
    with pytest.raises(UserError, match=r"has no tensor of whole numbers.*at 'z'"):
        step_gradients(fixes.apply("micro_batches:labels=z", work))


@pytest.mark.parametrize("kind", ["GPT-2", "Llama", "BERT", "T5"])
def test_labels_are_counted_as_hugging_face_models_count_them(kind):
    work = oomph.Workload(ARCHITECTURES[kind]().model, lambda device: uneven(device, "labels", "input_ids"))
    assert shifts_labels(work.model()) == (kind in ("GPT-2", "Llama"))
    (loss, before), (new_loss, after) = (
        step_gradients(work),
        step_gradients(fixes.apply("micro_batches", work)),
    )
    # The models compute their loss in float32; and a key's bias changes nothing, its gradient is rounding.
    for grads in (before, after):
        for name in [name for name in grads if name.endswith("key.bias")]:
            del grads[name]
    same_gradients((loss, before), (new_loss, after), 1e-6)


def test_models_that_divide_by_the_whole_themselves_add_up():
    def loss(model, batch):
        logits = model(batch["tokens"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return total / batch["num_items_in_batch"]

    def batch(device):
        made = uneven(device)
        return {**made, "num_items_in_batch": (made["targets"] != -100).sum()}

    work = replace(workload(layers=1), batch=batch, loss=loss)
    same_gradients(step_gradients(work), step_gradients(fixes.apply("micro_batches", work)), 1e-12)


def test_parts_are_proposed_as_they_divide_the_rows():
    work = workload(layers=1, width=128, longest=256)
    work = replace(work, batch=lambda device: tiny_batch(device, 12, 256))
    proposals = proposed("micro_batches", work)
    assert [proposal.options["parts"] for proposal in proposals] == [4, 2]  # 8 does not divide 12
    savings = [proposal.saving for proposal in proposals]
    assert savings[0] > savings[1] > 0
    assert all(proposal.slowdown > 1 for proposal in proposals)
    for proposal in proposals:
        assert "mean over labels that count" in proposal.note
        assert "a sum, or a loss that compares rows" in proposal.note


def test_it_is_not_proposed_where_batch_statistics_are_used():
    assert not_found("micro_batches", ARCHITECTURES["Classifier"]())


ROWS = torch.ones(4, 3)
WHOLE = torch.ones(4, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "condition"),
    [
        (WHOLE, ""),
        ({"tokens": WHOLE, "targets": WHOLE}, ""),
        ({"input_ids": WHOLE, "attention_mask": WHOLE, "labels": WHOLE}, ""),
        ({"a": WHOLE, "b": WHOLE, "num_items_in_batch": torch.tensor(3)}, ""),
        ((ROWS, torch.ones(4, dtype=torch.long)), "no tensor of the batch is named labels or targets"),
        ((ROWS, ROWS, WHOLE), "no tensor of the batch is named labels or targets"),
        ({"tokens": WHOLE, "targets": WHOLE, "loss_mask": ROWS}, "whatever 'loss_mask' of the batch says"),
    ],
)
def test_batches_that_tell_what_their_parts_count_and_others(batch, condition):
    work = oomph.Workload(lambda: nn.Linear(3, 1), lambda device: batch, lambda m, x: m(ROWS).mean())
    offers = fixes.find("micro_batches").proposals(FixContext(None, work))
    assert [offer.options["parts"] for offer in offers] == [2, 4]
    for offer in offers:
        assert condition in offer.condition
        assert bool(offer.condition) == bool(condition)


def test_a_batch_whose_labels_are_all_ignored_has_no_gradient():
    def ignored(device):
        return {**uneven(device), "targets": torch.full((6, 24), -100, device=device)}

    loss, grads = step_gradients(fixes.apply("micro_batches", replace(workload(layers=1), batch=ignored)))
    assert loss == 0
    assert all(grad is None or (grad == 0).all() for grad in grads.values())
