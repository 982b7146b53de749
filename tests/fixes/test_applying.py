"""Applying fixes: order, twice, half-way failures, models that must be refused, records of what changed."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from small import TinyLM, gradients, plain_loss, same_gradients, seeded, state_of, tiny_batch, workload
from torch import nn

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes import application, registry
from oomph.fixes.registry import Fix
from oomph.records import FixUse, Proposal


class Doubling(Fix):
    """Doubles what a module gives, so that it can be seen where and in which order it was applied."""

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
    excludes = {"adding": "one of them is enough"}  # noqa: RUF012

    def change_workload(self, workload, *, passes=2):
        from dataclasses import replace

        return replace(workload, accumulate=passes)


class _Times:
    def __init__(self, times):
        self.times = times

    def __call__(self, forward, *args):
        return self.times * forward(*args)


def _plus_one(forward, *args):
    return forward(*args) + 1


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """In this order, whatever order they are given in."""
    mine = (Doubling(), Adding(), Accumulating())
    monkeypatch.setattr(registry, "_by_name", lambda: {fix.name: (i, fix) for i, fix in enumerate(mine)})
    monkeypatch.setattr(application, "all_fixes", lambda: mine)


def _model():
    model = nn.Sequential()
    model.add_module("head", nn.Identity())
    return model


def test_fixes_are_applied_in_the_order_of_the_registry():
    for given in (["doubling", "adding"], ["adding", "doubling"]):
        model = _model()
        fixes.apply_to_model(given, model)
        assert model(torch.tensor(3.0)) == 7  # 2 * 3 + 1


def test_what_is_there_already_is_not_applied_again():
    model = _model()
    first = fixes.apply_to_model("doubling", model)
    state = state_of(model)
    assert [(change.fix, change.where, change.what) for change in first] == [("doubling", "head", "times 2")]
    assert fixes.apply_to_model(["doubling", "doubling"], model) == ()
    assert state_of(model) == state
    with pytest.raises(UserError, match=r"'doubling' is already applied with the options \{\}"):
        fixes.apply_to_model(FixUse("doubling", {"times": 3}), model)


def test_a_failure_half_way_leaves_the_model_as_it_was():
    model = _model()
    fixes.apply_to_model("doubling", model)
    state = state_of(model)
    with pytest.raises(UserError, match="half-way"):
        fixes.apply_to_model(FixUse("adding", {"then_fail": True}), model)
    assert state_of(model) == state
    assert model(torch.tensor(3.0)) == 6
    assert [change.fix for change in fixes.changes_in(model)] == ["doubling"]


def test_a_fix_that_comes_too_late_is_refused():
    model = _model()
    fixes.apply_to_model("adding", model)
    message = "'doubling' has to be applied before 'adding', which is already applied; apply them in one call"
    with pytest.raises(UserError, match=message):
        fixes.apply_to_model("doubling", model)
    with pytest.raises(UserError, match=message):
        oomph.apply("doubling", oomph.apply("adding", workload()))
    assert model(torch.tensor(3.0)) == 4


def test_a_model_and_its_fixes_are_freed_together():
    model = _model()
    fixes.apply_to_model("doubling", model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_undo_after_a_move_brings_the_old_tensors_along():
    class Replacing(Doubling):
        name = "doubling"

        def change_model(self, model, journal):
            journal.set(model.head, "weight", nn.Parameter(torch.zeros(2, 2)), "head", "zeros")

    model = nn.Sequential()
    model.add_module("head", nn.Linear(2, 2))
    weight, numbers = model.head.weight, model.head.weight.detach().clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_by_name", lambda: {"doubling": (0, Replacing())})
        fixes.apply_to_model("doubling", model)
    model.to(torch.bfloat16)
    fixes.undo(model)
    assert model.head.weight is weight
    assert torch.equal(model.head.weight, numbers.bfloat16())


def test_a_model_of_the_users_own_is_not_touched_by_a_prediction():
    model = seeded(TinyLM)
    work = oomph.Workload(lambda: model, tiny_batch, plain_loss)
    state, before = state_of(model), oomph.predict(work, gpu="h200").peak
    oomph.predict(oomph.apply("doubling", work), gpu="h200")
    assert state_of(model) == state
    assert oomph.predict(work, gpu="h200").peak == before
    fixes.verify("doubling", work)
    assert state_of(model) == state
    assert model.head.weight.dtype == torch.float32


def test_undo_takes_everything_out_and_twice_is_once():
    model = _model()
    state = state_of(model)
    fixes.apply_to_model(["doubling", "adding"], model)
    fixes.undo(model)
    fixes.undo(model)
    assert state_of(model) == state
    assert fixes.changes_in(model) == ()
    fixes.apply_to_model("doubling", model)  # and it can be fixed again
    assert model(torch.tensor(3.0)) == 6


def test_what_was_put_over_a_fix_is_not_thrown_away():
    model = _model()
    fixes.apply_to_model(["doubling", "adding"], model)
    ours = model.head.forward
    model.head.forward = lambda x: -ours(x)
    with pytest.raises(UserError, match="'forward' of 'head' was replaced after fix 'adding' had"):
        fixes.undo(model)
    assert model(torch.tensor(3.0)) == -7
    model.head.forward = ours
    fixes.undo(model)
    assert model(torch.tensor(3.0)) == 3


def test_a_default_that_is_given_is_the_same_as_one_left_out():
    model = _model()
    fixes.apply_to_model("doubling", model)
    assert fixes.apply_to_model(FixUse("doubling", {"times": 2}), model) == ()


def test_copies_of_a_fixed_model_use_their_own_modules():
    model = seeded(TinyLM)
    fixes.apply_to_model("doubling", model)
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    before = model(torch.tensor([[1, 2]])).detach()
    with torch.no_grad():
        model.head.weight.zero_()
    for twin in twins:
        assert torch.equal(twin(torch.tensor([[1, 2]])), before)


def test_a_copy_or_a_part_of_a_fixed_model_is_not_fixed_again():
    model = _model()
    fixes.apply_to_model("doubling", model)
    outer = nn.Sequential(model)
    for other, message in (
        (copy.deepcopy(model), "the model is a copy of a model with fixes"),
        (pickle.loads(pickle.dumps(model)), "the model is a copy of a model with fixes"),
        (model.head, "'the model' has fixes that were applied to another model"),
        (outer, "'0' has fixes that were applied to another model"),
    ):
        for change in (fixes.undo, lambda other: fixes.apply_to_model("doubling", other)):
            with pytest.raises(UserError, match=message):
                change(other)
    with pytest.raises(UserError, match="undo takes a model; Workload was given"):
        fixes.undo(workload())


def test_a_workload_is_fixed_without_touching_the_one_given():
    work = workload()
    fixed = oomph.apply(["accumulating", FixUse("doubling", {"times": 3})], work)
    assert (work.fixes, work.accumulate) == ((), 1)
    assert (fixed.accumulate, fixed.fixes) == (2, (FixUse("doubling", {"times": 3}), FixUse("accumulating")))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(fixed.model()(tokens), 3 * work.model()(tokens))
    assert oomph.apply("accumulating", fixed) is fixed
    twice = oomph.apply([{"fix": "adding"}], oomph.apply("doubling", work))
    assert torch.equal(twice.model()(tokens), 2 * work.model()(tokens) + 1)


def test_a_model_that_the_factory_hands_out_twice_is_fixed_once():
    model = _model()
    fixed = oomph.apply("doubling", oomph.Workload(lambda: model, lambda device: None))
    assert fixed.model() is model
    assert fixed.model()(torch.tensor(3.0)) == 6


def test_proposals_and_plans_can_be_applied():
    proposal = Proposal("doubling", "training", "", ("head",), {"times": 5})

    class Plan:
        fixes = (proposal.use, FixUse("adding"))

    tokens = torch.tensor([[1]])
    plain = workload().model()(tokens)
    assert torch.equal(oomph.apply(proposal, workload()).model()(tokens), 5 * plain)
    assert torch.equal(oomph.apply(Plan(), workload()).model()(tokens), 5 * plain + 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("dubbling", "there is no fix 'dubbling'; did you mean 'doubling'?"),
        ("zzz", "there is no fix 'zzz'; the fixes are doubling, adding, accumulating"),
        ([{"fix": "doubling", "option": 3}], "a fix is given as"),
        (
            FixUse("doubling", {"time": 3}),
            "fix 'doubling' has no option 'time'; its options are module, times",
        ),
        (["accumulating", "adding"], "cannot be combined: one of them is enough"),
        (7, "fixes=7 is not valid"),
    ],
)
def test_mistakes_are_one_clear_line(given, message):
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        oomph.apply(given, workload())
    assert message in str(caught.value)


def test_a_model_takes_no_fix_of_the_step():
    with pytest.raises(UserError, match="'accumulating' changes the step, not the model"):
        fixes.apply_to_model("accumulating", _model())
    with pytest.raises(UserError, match="apply takes fixes and a Workload or a model; int was given"):
        oomph.apply("doubling", 3)


def test_apply_takes_a_live_model_and_a_fix_written_as_on_the_command_line():
    model = _model()
    changed = oomph.apply("doubling:times=4", model)
    assert [type(change) for change in changed] == [oomph.Change]
    assert model(torch.tensor(3.0)) == 12
    fixes.undo(model)
    assert model(torch.tensor(3.0)) == 3
    assert oomph.apply(["accumulating:passes=4"], workload()).accumulate == 4


def _compiled():
    return torch.compile(_model())


def _scripted():
    return torch.jit.script(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (_compiled, "the model is compiled"),
        (lambda: nn.DataParallel(_model()), "wrapped in DataParallel"),
        (_scripted, "scripted by torch.jit"),
    ],
)
def test_models_that_are_not_in_charge_of_themselves_are_refused(build, message):
    model = build()
    with pytest.raises(UserError, match=message):
        fixes.apply_to_model("doubling", model)
    assert application._JOURNAL not in vars(model)


def test_passes_of_micro_batches_have_the_gradients_of_the_whole():
    from dataclasses import replace

    from oomph.workload import MicroBatches

    work, model, batch = workload(), seeded(TinyLM), tiny_batch("cpu", rows=5)
    whole = gradients(model, plain_loss, batch)

    def in_parts(model, batch):
        passes = replace(work, micro_batches=MicroBatches(3)).passes(batch)
        assert [part["tokens"].shape[0] for part, _ in passes] == [1, 2, 2]
        return sum(plain_loss(model, part) * factor for part, factor in passes)

    same_gradients(whole, gradients(model, in_parts, batch), 1e-5)
    positions = {"places": torch.arange(7), **batch}  # the first tensor need not be the batch
    passes = replace(work, micro_batches=MicroBatches(5)).passes(positions)
    assert [(part["places"].shape[0], part["tokens"].shape[0]) for part, _ in passes] == [(7, 1)] * 5
    with pytest.raises(UserError, match="a batch of 5 rows cannot be cut into 6 parts"):
        replace(work, micro_batches=MicroBatches(6)).passes(batch)
