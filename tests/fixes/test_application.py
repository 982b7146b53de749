"""Applying and undoing fixes, the ways to write them, models that are refused, and proposals."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from small import TinyLM, plain_loss, seeded, state_of, tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fix_names import APPLICATION_ORDER
from oomph.fixes import registry
from oomph.fixes.registry import Fix
from oomph.records import FixUse, Proposal


class Doubling(Fix):
    """Doubles what a module returns, so that the order of application shows."""

    name, kind, changes = "doubling", "training", "Doubles."

    def change_model(self, model, journal, *, module="head", times=2):
        journal.wrap_forward(model.get_submodule(module), _Times(times), module, f"times {times}")


class Adding(Doubling):
    name = "adding"

    def change_model(self, model, journal, *, module="head", then_fail=False):
        journal.wrap_forward(model.get_submodule(module), _plus_one, module, "plus 1")
        if then_fail:
            raise UserError("half-way")


class Accumulating(Fix):
    name, kind, changes = "accumulating", "exact", "Two passes."

    def change_workload(self, workload, *, passes=2):
        return replace(workload, accumulate=passes)


class Replacing(Fix):
    name, kind, changes = "replacing", "training", "Zeros."

    def change_model(self, model, journal):
        journal.set(model.head, "weight", nn.Parameter(torch.zeros(2, 2)), "head", "zeros")


class _Times:
    def __init__(self, times):
        self.times = times

    def __call__(self, forward, *args):
        return self.times * forward(*args)


def _plus_one(forward, *args):
    return forward(*args) + 1


@pytest.fixture
def _own_fixes(monkeypatch):
    mine = (Doubling(), Adding(), Accumulating(), Replacing())
    monkeypatch.setattr(registry, "_by_name", lambda: {fix.name: (i, fix) for i, fix in enumerate(mine)})


own_fixes = pytest.mark.usefixtures("_own_fixes")


def _model():
    model = nn.Sequential()
    model.add_module("head", nn.Identity())
    return model


# ------------------------------------------------------------------------------------------ live models


@own_fixes
def test_fixes_are_applied_in_the_order_of_the_registry():
    for given in (["doubling", "adding"], ["adding", "doubling"]):
        model = _model()
        fixes.apply_to_model(given, model)
        assert model(torch.tensor(3.0)) == 7  # 2 * 3 + 1


@own_fixes
def test_a_fix_is_not_applied_twice():
    model = _model()
    first = fixes.apply_to_model("doubling", model)
    state = state_of(model)
    assert [(change.fix, change.where, change.what) for change in first] == [("doubling", "head", "times 2")]
    assert fixes.apply_to_model(["doubling", "doubling"], model) == ()
    assert fixes.apply_to_model("doubling:times=2", model) == ()  # the default
    assert state_of(model) == state
    with pytest.raises(UserError, match=r"'doubling' is already applied with the options \{\}"):
        fixes.apply_to_model("doubling:times=3", model)


@own_fixes
def test_a_failure_half_way_restores_the_model():
    model = _model()
    fixes.apply_to_model("doubling", model)
    state = state_of(model)
    with pytest.raises(UserError, match="half-way"):
        fixes.apply_to_model(FixUse("adding", {"then_fail": True}), model)
    assert state_of(model) == state
    assert [change.fix for change in fixes.changes_in(model)] == ["doubling"]


@own_fixes
def test_a_fix_that_comes_too_late_is_refused():
    model = _model()
    fixes.apply_to_model("adding", model)
    message = "'doubling' has to be applied before 'adding', which is already applied"
    with pytest.raises(UserError, match=message):
        fixes.apply_to_model("doubling", model)
    with pytest.raises(UserError, match=message):
        oomph.apply("doubling", oomph.apply("adding", workload()))
    assert model(torch.tensor(3.0)) == 4


@own_fixes
def test_apply_takes_a_live_model_and_undo_restores_it():
    model = _model()
    state = state_of(model)
    changed = oomph.apply(["doubling:times=4", "adding"], model)
    assert [type(change) for change in changed] == [oomph.Change] * 2
    assert model(torch.tensor(3.0)) == 13
    for _ in range(2):
        oomph.undo(model)
        assert state_of(model) == state
        assert fixes.changes_in(model) == ()
    with pytest.raises(UserError, match="'accumulating' changes the step, not the model"):
        oomph.apply("accumulating", model)
    with pytest.raises(UserError, match="undo takes a model; Workload was given"):
        fixes.undo(workload())


@own_fixes
def test_undo_refuses_to_discard_what_replaced_a_fix():
    model = _model()
    fixes.apply_to_model(["doubling", "adding"], model)
    ours = model.head.forward
    model.head.forward = lambda x: -ours(x)
    with pytest.raises(UserError, match="'forward' of 'head' was replaced after fix 'adding'"):
        fixes.undo(model)
    assert model(torch.tensor(3.0)) == -7
    model.head.forward = ours
    fixes.undo(model)
    assert model(torch.tensor(3.0)) == 3


@own_fixes
def test_copies_of_a_model_with_fixes_call_their_own_modules_and_cannot_be_undone():
    model = seeded(TinyLM)
    fixes.apply_to_model("doubling", model)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    before = model(torch.tensor([[1, 2]])).detach()
    with torch.no_grad():
        model.head.weight.zero_()
    for twin in twins:
        assert torch.equal(twin(torch.tensor([[1, 2]])), before)
    for other, message in (
        *((twin, "the model is a copy of a model with fixes") for twin in twins),
        (model.head, "'the model' has fixes that were applied to another model"),
        (nn.Sequential(model), "'0' has fixes that were applied to another model"),
    ):
        for change in (fixes.undo, lambda other: fixes.apply_to_model("doubling", other)):
            with pytest.raises(UserError, match=message):
                change(other)


@own_fixes
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # deprecated, in other words in each release
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: torch.compile(_model()), "the model is compiled"),
        (lambda: nn.DataParallel(_model()), "wrapped in DataParallel"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "scripted by torch.jit"),
    ],
)
def test_models_that_cannot_be_changed_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        fixes.apply_to_model("doubling", build())


# -------------------------------------------------------------------------------------------- workloads


@own_fixes
def test_a_workload_is_changed_without_touching_the_one_given():
    work = workload()
    fixed = oomph.apply(["accumulating:passes=4", FixUse("doubling", {"times": 3})], work)
    assert (work.fixes, work.accumulate) == ((), 1)
    uses = (FixUse("doubling", {"times": 3}), FixUse("accumulating", {"passes": 4}))
    assert (fixed.accumulate, fixed.fixes) == (4, uses)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(fixed.model()(tokens), 3 * work.model()(tokens))
    assert oomph.apply("accumulating:passes=4", fixed) is fixed
    twice = oomph.apply([{"fix": "adding"}], oomph.apply("doubling", work))
    assert torch.equal(twice.model()(tokens), 2 * work.model()(tokens) + 1)


@own_fixes
def test_a_model_that_the_factory_returns_twice_is_changed_once_and_not_by_a_prediction():
    model = seeded(TinyLM)
    work = oomph.Workload(lambda: model, tiny_batch, plain_loss)
    state, before = state_of(model), oomph.predict(work, gpu="h200").peak
    oomph.predict(oomph.apply("doubling", work), gpu="h200")
    fixes.verify("doubling", work)
    assert state_of(model) == state
    assert oomph.predict(work, gpu="h200").peak == before
    tokens = torch.tensor([[1, 2, 3]])
    once = 2 * model(tokens)
    fixed = oomph.apply("doubling", work)
    assert fixed.model() is fixed.model() is model
    assert torch.equal(model(tokens), once)


# ---------------------------------------------------------------------------------------- writing fixes


@own_fixes
def test_every_way_to_write_a_fix(tmp_path):
    use = FixUse("doubling", {"times": 5})
    row = {"fix": "doubling", "options": {"times": 5}, "saving": 3}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    (tmp_path / "object.json").write_text(json.dumps({"fixes": ["doubling:times=5"]}))

    class Plan:
        fixes = (use,)

    for given in (
        use,
        "doubling:times=5",
        " doubling : times = 5 ",
        ["doubling:times=5"],
        row,
        Proposal("doubling", "training", "", ("head",), {"times": 5}),
        Plan(),
        str(tmp_path / "rows.json"),
        [str(tmp_path / "object.json")],
    ):
        assert fixes.uses_of(given) == [use]
    for given in ('doubling:module=["a","b"],times=2', "doubling:module=[a, b],times=2"):
        assert fixes.uses_of(given)[0].options == {"module": ["a", "b"], "times": 2}


def test_apply_takes_fixes_and_a_workload_or_a_model():
    with pytest.raises(UserError, match="a Workload or a model; int was given"):
        oomph.apply("activation_checkpointing", 3)
    with pytest.raises(UserError, match="fixes=7 is not valid"):
        oomph.apply(7, workload())


def test_every_fix_has_the_name_by_which_it_is_checked():
    assert [fix.name for fix in fixes.all_fixes()] == list(APPLICATION_ORDER)


@own_fixes
def test_undo_after_a_move_moves_the_old_tensors():
    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 2))
    weight, numbers = model.head.weight, model.head.weight.detach().clone()
    fixes.apply_to_model("replacing", model)
    model.to(torch.bfloat16)
    fixes.undo(model)
    assert model.head.weight is weight
    assert torch.equal(model.head.weight, numbers.bfloat16())
