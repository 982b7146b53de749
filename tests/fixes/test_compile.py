"""The fix `compile`: predicted with the compiler, chosen by fit where it is allowed, undone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.records import FixUse
from oomph.torch_internals import functorch_config

MiB = 1 << 20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, x):
        return x * F.gelu(self.mix(x)).square().add(1).log()


STEP = oomph.Workload(
    model=Net,
    batch=lambda device: torch.randn(1 << 19, 64, device=device),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=None,
)


def test_progress_names_what_is_compiled():
    # The first test: the forks of others have what it loads.
    texts = []
    fixed = oomph.apply("compile:activation_memory_budget=0.5", STEP)
    prediction = oomph.predict(fixed, gpu="h200", progress=lambda text, fraction: texts.append(text))
    assert "compiling Net" in texts
    assert prediction.peak.allocated < oomph.predict(STEP, gpu="h200").peak.allocated
    assert [note.text for note in prediction.notes] == ["with the fixes compile"]


def test_fit_takes_it_with_a_budget_where_it_is_allowed():
    plan = oomph.fit(STEP, gpu="h200", max=1000 * MiB, allow=("compile",))
    assert plan.fits
    assert plan.fixes == (FixUse("compile", {"activation_memory_budget": 0.5}),)
    assert plan.after.slowdown < 1  # kernels are fused
    assert any(one.fixes == (FixUse("compile"),) and not one.fits for one in plan.front)


def test_a_model_is_compiled_in_place_once_and_undone():
    model = Net()
    changes = oomph.apply("compile:activation_memory_budget=0.5", model)
    assert [change.fix for change in changes] == ["compile", "compile"]
    assert model._compiled_call_impl is not None
    assert oomph.apply("compile:activation_memory_budget=0.5", model) == ()
    with pytest.raises(UserError, match="already applied"):
        oomph.apply("activation_checkpointing", model)
    fixes.undo(model)
    assert model._compiled_call_impl is None
    assert functorch_config.activation_memory_budget == 1


@pytest.mark.parametrize("value", ["2", "-0.1", "true", "half"])
def test_a_budget_that_is_not_a_share_is_refused_and_nothing_stays(value):
    model = Net()
    with pytest.raises(UserError, match="give 0 to 1"):
        oomph.apply(f"compile:activation_memory_budget={value}", model)
    assert model._compiled_call_impl is None


def test_it_is_refused_with_what_the_compiler_bypasses_and_by_verify():
    with pytest.raises(UserError, match="no effect"):
        oomph.apply(["compile", "fused_linear_cross_entropy"], STEP)
    with pytest.raises(UserError, match="CPU"):
        fixes.verify("compile", STEP)
    with pytest.raises(UserError, match="'compile'"):
        fixes.find("torch.compile")
