"""bfloat16 parameters and autocast: proposed where the parameters are float32, and what they mean."""

from dataclasses import replace

import pytest
import torch
from short_training import not_found, proposed, trained
from small import tiny_batch, workload

import oomph
from oomph import fixes
from oomph.fixes.registry import FixContext


def larger(**changes):
    work = workload(layers=1, width=512, heads=4, longest=256)
    return replace(work, **changes)


def test_bf16_parameters_halve_parameters_and_state():
    work = larger()
    fixed = fixes.apply("bf16_parameters", work)
    assert fixed.dtype is torch.bfloat16
    (proposal,) = proposed("bf16_parameters", work)
    before, after = (dict(oomph.predict(w, gpu="h200").by_stage()) for w in (work, fixed))
    assert after["parameters"] == pytest.approx(before["parameters"] / 2, rel=0.02)
    assert after["optimizer state"] == pytest.approx(before["optimizer state"] / 2, rel=0.02)
    assert proposal.saving > 0
    assert proposal.kind == "precision"
    assert "lost" in proposal.changes
    parameters, _ = trained(fixes.apply("bf16_parameters", workload()), steps=1)
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}


def test_autocast_leaves_the_parameters_alone():
    work = replace(larger(), batch=lambda device: tiny_batch(device, 32, 256))
    (proposal,) = proposed("autocast", work)
    fixed = fixes.apply("autocast", work)
    before, after = (dict(oomph.predict(w, gpu="h200").by_stage()) for w in (work, fixed))
    assert after["parameters"] == before["parameters"]
    assert after["forward activations"] < 0.8 * before["forward activations"]
    assert proposal.saving > 0


def test_nothing_is_proposed_where_it_is_so_already():
    for work in (replace(workload(), dtype="bfloat16"), replace(workload(), dtype="float16")):
        assert not_found("bf16_parameters", work)
        assert not_found("autocast", work)
    assert not_found("autocast", replace(workload(), autocast="bfloat16"))
    old = FixContext(oomph.predict(workload(), gpu="t4"), workload())
    assert fixes.find("autocast").proposals(old) == fixes.find("bf16_parameters").proposals(old) == []
