"""Exact fixes leave loss, gradients and updates of twelve architectures as they were."""

import pytest
from architectures import ARCHITECTURES

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.fixes.registry import FixContext
from oomph.fixes.verification import EXACT, differences, run, widened
from oomph.records import FixUse

USES = {
    "activation_checkpointing": {},
    "activation_offloading": {"smallest": 1},
    "fused_linear_cross_entropy": {"memory_budget": "1KiB"},  # no logits fit into it
    "micro_batches": {},
    "tiled_mlp": {"tile": 7},
}
# Applied together; each on its own is tested with one model.
TOGETHER = (
    ("activation_checkpointing", "micro_batches"),
    (
        "activation_offloading",
        "fused_linear_cross_entropy",
        "tiled_mlp",
    ),
)
# These do not depend on the architecture, or their own tests run every architecture.
ELSEWHERE = {
    "fsdp2",
    "allocator",
    "fused_optimizer",
    "no_foreach",
    "optimizer_in_backward",
    "optimizer_cpu_offload",
}
# What there is nothing to do about, or nothing that would be exact; it says so.
REFUSED = {
    ("fused_linear_cross_entropy", "Classifier"): "no linear head",
    ("fused_linear_cross_entropy", "ViT"): "no linear head",
    ("micro_batches", "Classifier"): "normalises by the statistics of the batch",
    ("tiled_mlp", "Classifier"): "no MLPs",
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_exact_fixes_are_exact(name):
    """As verify does, with one run of the unfixed workload for all."""
    work = widened(ARCHITECTURES[name]())
    unfixed = run(work)
    for fix, model in REFUSED:
        if model == name:
            with pytest.raises(UserError, match=REFUSED[fix, name]):
                fixes.apply(FixUse(fix, USES[fix]), work).model()
    for names in TOGETHER:
        uses = [FixUse(fix, USES[fix]) for fix in names if (fix, name) not in REFUSED]
        found = differences(unfixed, run(fixes.apply(uses, work)), comparable=True)
        assert found[0].error <= EXACT, (names, found[:5])


@pytest.mark.parametrize("name", ["TinyLM", "Gemma-2"])
def test_what_is_proposed_for_it_is_exact(name):
    work = ARCHITECTURES[name]()
    context = FixContext(oomph.predict(work, gpu="h200"), work)
    for fix in fixes.all_fixes():
        if fix.kind == "exact" and fix.name not in {*USES, *ELSEWHERE}:
            for proposal in fix.proposals(context):
                found = fixes.verify(proposal, work)
                assert found.holds, (proposal.fix, proposal.options, found.differences[:5])
