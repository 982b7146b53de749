"""Exact fixes leave loss and gradients of thirteen architectures as they were."""

import pytest
from architectures import ARCHITECTURES

import oomph
from oomph import fixes
from oomph.errors import UserError
from oomph.records import FixUse

# What a fix cannot do on some of them, and says so.
REFUSALS = {
    "fused_loss": "no linear head|has no module|no head",
    "attention_backend": "eager|no Hugging Face|caps its attention scores",
    "fused_attention": "no module|no attention|writes",
    "tiled_mlp": "no MLPs that are found",
    "recompute": "no list of blocks",
    "offload_activations": "no list of blocks",
    "shared_buffers": "no two layers",
    "micro_batches": "statistics of the batch",
}
OPTIONS = {"offload_activations": {"smallest": 1}, "tiled_mlp": {"tile": 7}}


@pytest.mark.parametrize("fix", ["recompute", "fused_loss", "tiled_mlp", "micro_batches", "fused_optimizer"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_exact_fix_is_exact_or_says_why_it_cannot_be(name, fix):
    work = ARCHITECTURES[name]()
    try:
        found = fixes.verify(FixUse(fix, OPTIONS.get(fix, {})), work)
    except UserError as error:
        assert any(word in str(error) for word in REFUSALS.get(fix, "never").split("|")), error
        return
    assert found.holds, found.differences[:5]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_proposed_for_it_is_exact(name):
    work = ARCHITECTURES[name]()
    prediction = oomph.predict(work, gpu="h200")
    patient = fixes.fix.Patient(prediction, work)
    for fix in fixes.all_fixes():
        if fix.kind == "exact" and fix.name not in ("shard", "allocator"):
            for proposal in fix.found(patient):
                found = fixes.verify(proposal, work)
                assert found.holds, (proposal.fix, proposal.options, found.differences[:5])
