"""Fixes that decide by names are compared on a small copy of the step before `fit` proposes them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import oomph
from oomph import fixes
from oomph.fixes.registry import FixContext
from oomph.fixes.small_copy import checked_proposals

ROWS, WIDTH = 4096, 256


def perceptron(width=4 * WIDTH):
    return nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH))


def workload(loss, model=perceptron):
    def batch(device):
        return torch.randn(ROWS, WIDTH, device=device), torch.randn(ROWS, WIDTH, device=device)

    return oomph.Workload(model, batch, loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def mean(model, pair):
    return F.mse_loss(model(pair[0]), pair[1])


def total(model, pair):
    return (model(pair[0]) - pair[1]).square().sum()


def contrastive(model, pair):
    scores = model(pair[0]) @ model(pair[1]).T
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def checked(name, work):
    return checked_proposals(fixes.find(name), FixContext(oomph.predict(work, gpu="h200"), work))


def llama(implementation="sdpa", vocabulary=32000):
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=vocabulary, **sizes)

    def batch(device):
        ids = torch.randint(0, vocabulary, (8, 512), device=device)
        return {"input_ids": ids, "labels": ids.masked_fill(ids < vocabulary // 2, -100)}

    def model():
        made = LlamaForCausalLM(config)
        made.set_attn_implementation(implementation)
        return made

    return oomph.Workload(model=model, batch=batch)


@pytest.mark.usefixtures("in_process")
def test_fit_leaves_out_parts_that_change_the_loss_and_says_so():
    work = workload(total)
    plan = oomph.fit(work, gpu="h200", max=int(0.7 * oomph.predict(work, gpu="h200").peak.reserved))
    assert "micro_batches" not in [use.fix for use in plan.fixes]
    (failed,) = [one for one in plan.failed if one.fixes[0].fix == "micro_batches"]
    assert "changes the" in failed.reason
    assert "float64" in failed.reason


def test_parts_of_a_loss_that_compares_rows_are_left_out():
    proposals, failed = checked("micro_batches", workload(contrastive))
    assert not proposals
    assert "changes the" in failed[0].reason


@pytest.mark.usefixtures("in_process")
def test_fit_says_that_parts_were_compared():
    work = workload(mean)
    plan = oomph.fit(work, gpu="h200", max=int(0.7 * oomph.predict(work, gpu="h200").peak.reserved))
    assert "micro_batches" in [use.fix for use in plan.fixes]
    assert any("compared in float64" in remark and "the model, 4 rows" in remark for remark in plan.remarks)


def test_a_large_model_of_transformers_has_a_narrow_copy_that_counts_labels():
    proposals, failed = checked("micro_batches", llama())
    assert not failed
    assert "2 layers of width" in proposals[0].note


def test_attention_that_a_fused_kernel_does_not_compute_is_found(monkeypatch):
    eager = modeling_llama.eager_attention_forward

    def capped(module, query, *rest, **options):
        return eager(module, query.tanh(), *rest, **options)

    work = llama("eager")
    proposals, failed = checked("attn_implementation", work)
    assert proposals
    assert not failed
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", capped)
    proposals, failed = checked("attn_implementation", work)
    assert not proposals
    assert "changes the" in failed[0].reason


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (workload(lambda model, pair: F.dropout(model(pair[0])).mean()), "random numbers"),
        (workload(mean, lambda: perceptron(60000)), "31 million parameters"),
        (workload(lambda model, pair: model(pair[0].reshape(ROWS, -1)).mean()), "cannot run"),
    ],
)
def test_what_cannot_be_compared_keeps_what_it_assumes(work, why):
    proposals, failed = checked("micro_batches", work)
    assert not failed
    assert "assumes a loss that is the mean" in proposals[0].note
    assert "not compared with the step without it (" in proposals[0].note
    assert why in proposals[0].note
