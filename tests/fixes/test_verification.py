"""verify: sees what is the same, and what is not."""

from dataclasses import replace

import pytest
import torch
from small import TinyLM, seeded, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes import registry
from oomph.fixes.registry import Fix


class Wrong(Fix):
    """Calls itself exact, and is off by one part in a thousand in one module's gradient."""

    name, kind, changes = "wrong", "exact", "Nothing, it says."

    def change_model(self, model, journal, *, factor=1.001):
        journal.wrap_forward(model.norm, _Scaled(factor), "norm", "scaled")


class _Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, forward, x):
        out = forward(x)
        out.register_hook(lambda grad: grad * self.factor)
        return out


@pytest.fixture
def _with_wrong(monkeypatch):
    known = {**registry._by_name(), "wrong": (99, Wrong())}
    monkeypatch.setattr(registry, "_by_name", lambda: known)


def test_an_exact_fix_holds():
    found = fixes.verify("activation_checkpointing", workload())
    assert found.holds
    assert (found.kind, found.tolerance) == ("exact", 1e-4)
    names = [each.name for each in found.differences]
    model = seeded(TinyLM)
    parameters, buffers = len(list(model.parameters())), len(list(model.buffers()))
    assert len(names) == 2 + 2 * parameters + buffers
    assert {"loss of step 1", "gradient of head.weight", "head.weight after 2 steps"} <= set(names)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"autocast": "bfloat16"}])
def test_rounding_to_16_bits_is_no_difference(options):
    found = fixes.verify("micro_batches:parts=2", replace(workload(), **options))
    assert found.holds
    assert found.differences[0].error < 1e-9


def test_a_model_for_16_bits_only_is_refused():
    def loss(model, batch):
        return model(batch.to(torch.bfloat16)).square().mean()

    work = oomph.Workload(lambda: nn.Linear(4, 4), lambda device: torch.randn(8, 4), loss, torch.optim.SGD)
    with pytest.raises(UserError, match="float32"):
        fixes.verify("micro_batches:parts=2", replace(work, dtype="bfloat16"))


@pytest.mark.usefixtures("_with_wrong")
def test_a_wrong_gradient_is_found():
    found = fixes.verify("wrong", workload())
    assert not found.holds
    worst = {each.name for each in found.differences if each.error > 5e-4}
    assert "gradient of embed.weight" in worst
    assert "gradient of head.weight" not in worst
    assert fixes.verify({"fix": "wrong", "options": {"factor": 1.0}}, workload()).holds


@pytest.mark.usefixtures("_with_wrong")
def test_not_a_number_never_holds():
    found = fixes.verify({"fix": "wrong", "options": {"factor": float("nan")}}, workload())
    assert not found.holds
    assert found.differences[0].error == float("inf")


def test_sizes_are_replaced_and_large_models_refused(capfd):
    def batch(device, B):
        print("batch of", B)
        return {"tokens": torch.zeros(B, 4, dtype=torch.long), "targets": torch.zeros(B, 4, dtype=torch.long)}

    work = replace(workload(), batch=batch, sizes={"B": 64})
    assert fixes.verify("activation_checkpointing", work, sizes={"B": 2}).holds
    assert capfd.readouterr().out.splitlines() == ["batch of 2"] * 2
    large = oomph.Workload(lambda: nn.Linear(2**16, 2**15), lambda device: None)
    with pytest.raises(UserError, match=r"has 8\.0 GiB of parameters; give a target with a small"):
        fixes.verify("activation_checkpointing", large)


def test_a_difference_that_dropout_may_explain_says_so():
    def model():
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))

    work = oomph.Workload(
        model,
        lambda device: torch.randn(8, 8, device=device),
        lambda model, batch: model(batch).square().mean(),
        torch.optim.SGD,
    )
    found = fixes.verify("micro_batches:parts=2", work)
    assert not found.holds
    assert "dropout" in found.notes[0]
    assert fixes.verify("allocator", work).notes == ()
