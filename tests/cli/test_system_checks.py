"""`oomph systems NAME --check`: the implementations of the report agree with ours."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oomph.cli import system_checks as checks
from oomph.cli.main import run
from oomph.ops import explain, linear_cross_entropy
from oomph.systems.longctx.claims import loss_backward_bytes, saved_by_chunked_loss
from oomph.systems.longctx.naive import should_chunk
from oomph.systems.npt import PRESETS
from oomph.systems.npt.base_model import SHAPES
from oomph.systems.npt.naive import COMPONENTS

pytestmark = pytest.mark.usefixtures("in_process")
GiB = 2**30


def test_the_reports_rule_changes_between_its_two_lengths():
    assert [should_chunk(tokens, 151_936) for tokens in (4096, 40_000)] == [False, True]


@pytest.mark.parametrize("name", list(checks.losses())[1:])
def test_losses_and_gradients_agree(name):
    assert checks.loss_error(checks.losses(checks.SMALL_CHUNK)[name]) < 1e-12


def test_the_small_shape_is_large_enough_for_the_chunked_implementation():
    hidden = torch.zeros(2, checks.SMALL_TOKENS, checks.SMALL.hidden_size, dtype=torch.float64)
    labels = torch.zeros(2, checks.SMALL_TOKENS, dtype=torch.long)
    weight = torch.zeros(checks.SMALL.vocab_size, checks.SMALL.hidden_size, dtype=torch.float64)
    assert explain(linear_cross_entropy, hidden, weight, labels, shift=True).impl == "chunked"


def test_chunking_alone_saves_as_much_for_backward_as_the_standard_loss():
    standard, chunked, recomputed, model = map(checks.loss_memory, checks.losses().values())
    assert standard.saved == pytest.approx(saved_by_chunked_loss(), rel=1e-3)
    assert chunked.saved == pytest.approx(standard.saved, rel=1e-3)
    assert standard.peak == pytest.approx(loss_backward_bytes(), rel=1e-3)
    assert chunked.peak < standard.peak / 2  # it does lower the peak
    assert recomputed.saved < 0.1 * GiB
    assert model.saved < 2 * GiB
    assert model.peak < 3 * GiB


def test_the_check_of_longctx_prints_the_reports_lines(capsys, monkeypatch):
    monkeypatch.setattr(checks, "loss_memory", lambda loss: checks.LossMemory(GiB, 2 * GiB))
    assert run(["systems", "002", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "Test 1: seq_len=4096, logits=1.16 GiB, should_chunk=False",
        "  Standard loss used",
        "Test 2: seq_len=40000, logits=11.32 GiB, should_chunk=True",
        "  Chunked loss used",
    ]
    monkeypatch.setattr(checks, "loss_error", lambda loss: 0.5)
    assert run(["systems", "longctx", "--check"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["ginr"]])
def test_not_every_system_has_a_check(arguments, capsys):
    assert run(["systems", *arguments, "--check"]) == 2
    assert "pythia or longctx or npt" in capsys.readouterr().err


def test_the_check_of_pythia_is_the_parameter_table(capsys):
    assert run(["systems", "001", "--check"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for part in ("transformer layers 18,902,016 75.6 MB", "total 29,208,576 116.8 MB", "70,426,624"):
        assert part in out


# ------------------------------------------------------------------------------------------- npt


@pytest.mark.parametrize("name", COMPONENTS)
def test_components_agree(name):
    assert checks.component_error(name) < 1e-12


def test_the_check_of_npt_prints_sizes_and_every_row_of_the_reports_table(capsys, monkeypatch):
    monkeypatch.setattr(checks, "naive_peak", lambda row: None)
    monkeypatch.setattr(checks, "model_peak", lambda row: GiB)
    assert run(["systems", "npt", "--check"]) == 0
    rows = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert "weight deltas of all tokens 344.00 GiB 448.00 GiB" in rows
    assert "one token's delta, B=1 172 MiB 224 MiB" in rows
    assert "one token's delta, B=4 688 MiB 896 MiB" in rows
    assert "modulation 128 KiB 128 KiB" in rows
    for name in (
        "Original",
        "Basic optimization",
        "+ CPU offload",
        "+ FP16",
        "+ Fewer layers",
        "Small model",
    ):
        assert any(row.startswith(name) and row.endswith("1.00 GiB") for row in rows)


@pytest.fixture
def gpt2(monkeypatch):
    """Two of three layers are converted. The input of the first has no gradient: one saves its weights."""
    pytest.importorskip("transformers")
    monkeypatch.setitem(SHAPES, "gpt2", ("gpt2", {"n_layer": 3}))
    small = next(row for row in checks.CONFIGURATIONS if row.model == "GPT-2")
    return replace(small, config=replace(PRESETS["small"], convert_layers=2))


def test_the_reports_loop_saves_a_weight_for_every_token_and_the_model_none(gpt2):
    weights = 512 * 768 * 3072 * 4  # W + dW
    peak = checks.naive_peak(gpt2)
    assert peak > weights > 4 * GiB
    assert checks.model_peak(gpt2) < 1 * GiB
    offloaded = replace(gpt2, component="per_token_offloaded")  # they come back, and are saved
    assert checks.naive_peak(offloaded) == pytest.approx(peak, rel=0.05)


def test_extrapolation_from_a_few_tokens_equals_the_trace(gpt2):
    traced = checks._naive_peak(gpt2.config, "per_token", 1, 10)
    assert checks.naive_peak(replace(gpt2, length=10)) == pytest.approx(traced, rel=0.01)
