"""Every two fixes that may be combined are: numbers hold, undo restores the model, twice is once."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
from architectures import ARCHITECTURES, prepared
from everything import Everything, workload
from small import seeded, state_of

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.registry import conflict
from oomph.fixes.verification import EXACT, differences, run, widened
from oomph.records import FixUse

# Shard needs a process group, the others a model that is made from a config; they have tests of their own.
ELSEWHERE = {"fsdp2", "fewer_converted_layers", "cheaper_mixing"}
# For the tiny model: what has no default, or one that a tiny model falls short of.
OPTIONS = {
    "smaller_vocabulary": {"size": 40},
    "activation_offloading": {"smallest": 1},
    "tiled_mlp": {"tile": 5},
    "chunkwise_kda": {"memory_chunk_size": 8},
    "gradient_accumulation_fusion": {"modules": ["blocks.0.mlp.fc", "head"]},
}
HUGGING_FACE = {"attn_implementation"}
NAMES = [fix.name for fix in fixes.all_fixes() if fix.name not in ELSEWHERE]
OWN = [name for name in NAMES if name not in HUGGING_FACE]


def use(name):
    return FixUse(name, OPTIONS.get(name, {}))


def combinable(names):
    return not any(conflict(use(a), use(b)) for a, b in itertools.combinations(names, 2))


@cache
def unfixed(kind):
    return run(widened(workload()) if kind == "exact" else workload(), steps=1)


def check_numbers(names):
    """As verify does, with one run of the unfixed workload for all."""
    kinds = {fixes.find(name).kind for name in names}
    kind = next(kind for kind in ("training", "precision", "exact") if kind in kinds)
    work = widened(workload()) if kind == "exact" else workload()
    after = run(oomph.apply([use(name) for name in names], work), steps=1)
    found = differences(unfixed(kind), after, comparable=kind != "training")
    if kind == "exact":
        assert found[0].error <= EXACT, found[:5]
    assert found[0].error < float("inf"), found[:5]
    if kind == "precision":  # bfloat16 and 8 bits move a loss by little
        assert max(each.error for each in found if each.name.startswith("loss")) < 0.02


def check_undo(names, model):
    """The fixes of the model alone: those of the step never touch it."""
    found = [fixes.find(name) for name in names]
    of_model = [use(fix.name) for fix in found if fix.changes_model and not fix.only_in_workloads]
    before = state_of(model)
    changed = fixes.apply_to_model(of_model, model)
    assert {change.fix for change in changed} == {each.fix for each in of_model}
    after = state_of(model)
    assert fixes.apply_to_model(of_model, model) == ()
    assert state_of(model) == after
    fixes.undo(model)
    assert state_of(model) == before


@pytest.mark.parametrize("first", OWN)
def test_every_fix_goes_with_every_other_that_it_does_not_exclude(first):
    check_numbers([first])
    model = seeded(Everything)
    check_undo([first], model)
    for second in OWN[OWN.index(first) + 1 :]:
        if combinable((first, second)):
            check_numbers((second, first))  # the order given is not the order applied
            check_undo((first, second), model)
        else:
            with pytest.raises(UserError, match="cannot be combined"):
                oomph.apply([use(first), use(second)], workload())


def test_all_exact_fixes_at_once():
    together: list[str] = []
    for name in OWN:
        if fixes.find(name).kind == "exact" and combinable((*together, name)):
            together.append(name)
    assert len(together) >= 13
    check_numbers(together)
    check_undo(together, seeded(Everything))


def test_a_hugging_face_model_takes_its_fixes_with_the_backend_of_attention():
    work = ARCHITECTURES["Llama"]()
    build = work.model

    def eager():
        model = build()
        model.set_attn_implementation("eager")
        return model

    work = replace(work, model=eager)
    for other in (
        "fused_linear_cross_entropy",
        "activation_checkpointing",
        "tiled_mlp",
        "activation_offloading",
        "micro_batches",
    ):
        found = fixes.verify(["attn_implementation", other], work)
        assert found.holds, found.differences[:5]
    check_undo(
        ["attn_implementation", "fused_linear_cross_entropy", "activation_checkpointing"], prepared(work)[0]
    )
