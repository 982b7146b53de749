"""The derived figures behind the claims of the reports."""

from __future__ import annotations

import csv

import pytest
import torch
from benchmarks import RESULTS
from benchmarks.systems.figures import claim_rows, collect

from oomph.errors import UserError
from oomph.systems import SYSTEMS, find_system
from oomph.systems.claims import VERDICTS, stored_figures
from oomph.systems.ginr import claims as ginr
from oomph.systems.hatchling import claims as hatchling
from oomph.systems.longctx import claims as longctx
from oomph.systems.npt import claims as npt
from oomph.systems.pythia import claims as pythia

GiB, MiB = 2**30, 2**20


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=list(SYSTEMS))
def test_every_claim_has_a_figure_a_verdict_and_a_reason(system):
    assert len(system.claims) >= 5
    for claim in system.claims:
        assert claim.verdict in VERDICTS
        assert claim.derive()
        assert claim.why
        assert claim.claimed


def test_figures_are_those_of_the_committed_rows():
    """Run python -m benchmarks.systems figures."""
    assert stored_figures() == collect()
    with (RESULTS / "claims.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == claim_rows()


def derived(name):
    return " | ".join(claim.derive() for claim in find_system(name).claims)


def test_hatchling():
    assert hatchling.transition_elements() == 134_217_728
    assert hatchling.transition_bytes(2) == 256 * MiB
    assert hatchling.transition_bytes(4) == 512 * MiB
    assert hatchling.alive_at_failure() == 2 * GiB
    assert hatchling.concatenated_chunks() == 2 * hatchling.transition_bytes(4)


def test_pythia():
    assert round(6 * pythia.layer_params() / 1e6, 1) == 18.9
    assert round(pythia.layer_params("pythia") / 1e6, 3) == 3.152
    assert pythia.total_params(10_000) == 29_208_576
    assert round(pythia.broadcast_bytes(32, 128) / 1e9, 2) == 1.07
    assert round(pythia.broadcast_bytes(8, 512) / 1e9, 2) == 4.29
    assert round(pythia.broadcast_products() * pythia.broadcast_bytes(8, 512) / 1e9, 1) == 51.5
    assert pythia.identity_bytes(50_000) == 10 * 10**9
    assert [pythia.attended_blocks(tokens) for tokens in (128, 256, 512)] == [(4, 4), (10, 16), (22, 64)]
    assert "70,426,624" in derived("pythia")


def test_longctx():
    sizes = [round(longctx.logits_bytes(tokens) / GiB, 2) for tokens in (4096, 40_000, 131_072)]
    assert sizes == [1.16, 11.32, 37.09]
    assert round(longctx.loss_backward_bytes() / GiB, 1) == 222.6
    assert round(longctx.loss_forward_bytes() / GiB, 1) == 185.5
    assert round(longctx.loss_forward_bytes(batch=2) / GiB, 1) == 222.6
    assert longctx.parameter_bytes() == 2 * 3_915_962_880
    assert round(longctx.duplicate_rope_bytes() / GiB, 2) == 1.41
    assert "7.31 GiB + 1.41 GiB" in derived("longctx")
    measured = longctx.AFTER_FIRST_LAYER + longctx.logits_bytes(131_072) / GiB
    assert measured == pytest.approx(longctx.AFTER_FORWARD, abs=0.02)
    assert longctx.saved_by_chunked_loss() == 2 * longctx.logits_bytes(131_072)
    assert round(longctx.sharded_gib(), 1) == 64.4


@pytest.mark.parametrize("tokens", [1024, 4096, 131_072])
def test_positions_that_bf16_can_tell_apart(tokens):
    assert longctx.distinct_bf16_positions(tokens) == torch.arange(tokens).bfloat16().unique().numel()


def test_npt():
    assert npt.whole_delta_bytes() == 344 * GiB
    assert npt.whole_delta_bytes(14336) == 448 * GiB
    assert npt.modulation_elements() == 32_768
    assert "128 KiB" in derived("npt")
    assert npt.token_delta_bytes(1) == 172 * MiB
    assert npt.token_delta_bytes(4) == 688 * MiB
    assert npt.TOKENS * npt.token_delta_bytes(npt.BATCH) == npt.whole_delta_bytes()


def test_ginr():
    assert ginr.attention_matrix_bytes() == 2 * GiB
    assert ginr.attentions(3) * ginr.attention_matrix_bytes() == 18 * GiB
    assert ginr.attentions(2) == 5
    assert ginr.feed_forward_saved() == 2.25 * GiB
    assert round(ginr.reduction_by_solution_1(), 2) == 0.10
    assert ginr.solution_1_saved() > 40 * GiB
    assert ginr.attentions(3) * ginr.attention_matrix_bytes(256) == 4.5 * GiB


def test_a_system_is_found_by_its_name_and_by_its_report():
    assert find_system("longctx") is find_system("002")
    with pytest.raises(UserError, match="no system 'mamba'; choose from hatchling, pythia"):
        find_system("mamba")
