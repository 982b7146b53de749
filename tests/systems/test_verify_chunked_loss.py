"""Report 002's verifier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oomph.cli import chunked_loss_check as verifier
from oomph.errors import ArgumentError
from oomph.ops import explain, linear_cross_entropy
from oomph.systems.longctx import PRESETS
from oomph.systems.longctx.claims import kept_by_chunks, loss_backward_bytes

GiB = 2**30
FORMS = verifier.forms()


def test_the_reports_rule_changes_over_between_its_two_lengths():
    assert [verifier.should_chunk(tokens, 151_936) for tokens in (4096, 40_000)] == [False, True]


@pytest.mark.parametrize("name", list(FORMS)[1:])
def test_losses_and_gradients_agree(name):
    assert verifier.largest_difference(verifier.forms(100)[name]) < 1e-12


def test_the_small_shape_is_large_enough_for_our_blocks():
    small = verifier._SMALL
    hidden = torch.zeros(2, verifier._SMALL_TOKENS, small.hidden_size, dtype=torch.float64)
    labels = torch.zeros(2, verifier._SMALL_TOKENS, dtype=torch.long)
    weight = torch.zeros(small.vocab_size, small.hidden_size, dtype=torch.float64)
    assert explain(linear_cross_entropy, hidden, weight, labels, shift=True).impl == "chunked"


def test_chunks_alone_keep_what_the_standard_loss_keeps_and_ours_does_not():
    standard, chunks, again, ours = (verifier.predicted_memory(form) for form in FORMS.values())
    assert standard.kept == pytest.approx(kept_by_chunks(), rel=1e-3)
    assert chunks.kept == pytest.approx(standard.kept, rel=1e-3)
    assert standard.peak == pytest.approx(loss_backward_bytes(), rel=1e-3)
    assert chunks.peak < standard.peak / 2  # it does lower the peak
    assert again.kept < 0.1 * GiB
    assert ours.kept < 2 * GiB
    assert ours.peak < 3 * GiB


@pytest.mark.parametrize("tied", [False, True])
def test_the_models_own_chunked_loss_is_that_of_its_forward(tied):
    torch.manual_seed(0)
    model = replace(PRESETS["tiny"], tie_word_embeddings=tied).build()
    ids = torch.randint(0, 256, (2, 30))
    hidden = model.hidden_states(ids)
    torch.testing.assert_close(model._compute_loss_chunked(hidden, ids), model(ids, ids).loss)
    torch.testing.assert_close(model._compute_loss_chunked(hidden, ids, chunk_size=7), model(ids, ids).loss)
    with pytest.raises(ArgumentError, match="chunk_size=0 is not valid"):
        model._compute_loss_chunked(hidden, ids, chunk_size=0)


def test_it_prints_what_the_report_prints(capsys, monkeypatch):
    monkeypatch.setattr(verifier, "predicted_memory", lambda form: verifier.Memory(GiB, 2 * GiB))
    assert verifier.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "Test 1: seq_len=4096, logits=1.16 GiB, should_chunk=False",
        "  Standard loss used",
        "Test 2: seq_len=40000, logits=11.32 GiB, should_chunk=True",
        "  Chunked loss used",
    ]


def test_a_wrong_loss_is_an_exit_status_of_one(capsys, monkeypatch):
    monkeypatch.setattr(verifier, "predicted_memory", lambda form: verifier.Memory(GiB, 2 * GiB))
    monkeypatch.setattr(verifier, "largest_difference", lambda form: 0.5)
    assert verifier.main() == 1
    assert "WRONG" in capsys.readouterr().out
