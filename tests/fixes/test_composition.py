"""Every two fixes compose or are refused: gradients hold, undo restores the model, twice is once."""

from dataclasses import fields, replace
from functools import cache
from itertools import combinations

import pytest
from architectures import ARCHITECTURES, prepared
from everything import Everything, batch, workload
from small import plain_loss, seeded, state_of

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.registry import conflict
from oomph.fixes.verification import EXACT, differences, run, widened
from oomph.records import FixUse

# They need a process group, a Hugging Face model or a compiler.
ELSEWHERE = {"fsdp2", "attn_implementation", "compile", "trainer_optim"}
# For the tiny model: what has no default, or one that a tiny model falls short of.
OPTIONS = {
    "smaller_vocabulary": {"size": 40},
    "activation_offloading": {"smallest": 1},
    "tiled_mlp": {"tile": 5},
    "gradient_accumulation_fusion": {"modules": ["blocks.0.mlp.fc", "head"]},
}
USES = {
    fix.name: FixUse(fix.name, OPTIONS.get(fix.name, {}))
    for fix in fixes.all_fixes()
    if fix.name not in ELSEWHERE
}
# Of fixes that leave the model alone, these are run with each of those that change it.
REPRESENTATIVES = {"autocast", "micro_batches", "optimizer_in_backward"}


@cache
def changed_fields(name):
    """What a fix changes in a Workload."""
    before = workload()
    after = oomph.apply(USES[name], before)
    names = {field.name for field in fields(before)} - {"fixes"}
    return {name for name in names if getattr(before, name) != getattr(after, name)}


def interact(one, other):
    if changed_fields(one) & changed_fields(other):
        return True
    return bool({one, other} & REPRESENTATIVES) and "model" in changed_fields(one) | changed_fields(other)


@cache
def unfixed(kind):
    return run(widened(workload()) if kind == "exact" else workload(), steps=1)


def kind_of(names):
    kinds = {fixes.find(name).kind for name in names}
    return next(kind for kind in ("training", "precision", "exact") if kind in kinds)


def excluded(one, other):
    return conflict(USES[one], USES[other])


def sets_with_every_pair():
    """Sets of fixes; every two that interact are in one in which the others are exact or of their kind."""
    left = [pair for pair in combinations(USES, 2) if not excluded(*pair) and interact(*pair)]
    while left:
        names, kind = list(left[0]), kind_of(left[0])
        for name in USES:
            fits = fixes.find(name).kind in ("exact", kind) and name not in names
            if fits and not any(excluded(name, one) for one in names):
                names.append(name)
        left = [pair for pair in left if kind_of(pair) != kind or not set(pair) <= set(names)]
        yield names


def check_numbers(names):
    """As verify does, with one run of the unfixed workload for all."""
    kind = kind_of(names)
    work = widened(workload()) if kind == "exact" else workload()
    after = run(oomph.apply([USES[name] for name in names], work), steps=1)
    found = differences(unfixed(kind), after, comparable=kind != "training")
    assert found[0].error < float("inf"), (names, found[:5])
    if kind == "exact":
        assert found[0].error <= EXACT, (names, found[:5])
    if kind == "precision":  # bfloat16 and 8 bits move a loss by little
        assert max(each.error for each in found if each.name.startswith("loss")) < 0.02, names


def check_undo(names, model):
    of_model = [name for name in names if "model" in changed_fields(name)]
    before = state_of(model)
    changed = fixes.apply_to_model([USES[name] for name in of_model], model)
    assert {change.fix for change in changed} == set(of_model)
    after = state_of(model)
    assert fixes.apply_to_model([USES[name] for name in of_model], model) == ()
    assert state_of(model) == after
    fixes.undo(model)
    assert state_of(model) == before


def test_every_fix_composes_with_every_other_that_it_does_not_exclude():
    model, sets = seeded(Everything), list(sets_with_every_pair())
    assert max(len(names) for names in sets if kind_of(names) == "exact") >= 10
    for names in sets:
        check_numbers(names[::-1])  # the order given is not the order applied
        check_undo(names, model)


def test_fixes_that_exclude_each_other_are_refused_together():
    for pair in combinations(USES, 2):
        if excluded(*pair):
            with pytest.raises(UserError, match="cannot be combined"):
                oomph.apply([USES[name] for name in pair], workload())


@pytest.mark.parametrize(
    "around",
    [
        'fused_attention:modules=[""]',
        'activation_checkpointing:blocks=[""]',
        'activation_offloading:blocks=["","blocks.0"]',
    ],
)
def test_logits_are_not_computed_though_another_fix_is_around_the_whole_model(around):
    model, given, heads = seeded(Everything), batch("cpu"), []
    model.head.register_forward_hook(lambda head, args, logits: heads.append(logits))
    fixes.apply([around, FixUse("fused_linear_cross_entropy", {"memory_budget": "1KiB"})], model)
    plain_loss(model, given).backward()
    assert heads
    assert not any(logits.expression.computed for logits in heads)


def test_a_hugging_face_model_takes_its_fixes_with_attn_implementation():
    work = ARCHITECTURES["Llama"]()
    build = work.model

    def eager():
        model = build()
        model.set_attn_implementation("eager")
        return model

    work = replace(work, model=eager)
    of_model = ["attn_implementation", "fused_linear_cross_entropy", "activation_checkpointing", "tiled_mlp"]
    of_model.append("activation_offloading")
    found = fixes.verify([*of_model, "micro_batches"], work)
    assert found.holds, found.differences[:5]
    model, _ = prepared(work)
    before = state_of(model)
    fixes.apply_to_model(of_model, model)
    fixes.undo(model)
    assert state_of(model) == before
