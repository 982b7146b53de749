"""Pythia-70M: the model, and the naive form of report 001."""

from dataclasses import replace

import pytest
import torch
from text_batches import text_batch, tokens

import oomph
from oomph.errors import ArgumentError
from oomph_lab.systems.pythia import PRESETS, create_pythia_70m
from oomph_lab.systems.pythia.naive import (
    REPORT,
    REPORT_VOCAB_SIZE,
    NaivePythia,
)

pytestmark = pytest.mark.usefixtures("in_process")

TINY = {"vocab_size": 50, "seq_len": 24, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64}
TINY_REPORT = replace(PRESETS["report"], **TINY, num_layers=2, dropout=0.0)


def test_the_published_model_has_its_70_million_parameters():
    config = PRESETS["pythia"]
    assert config.get_total_params() == 70_426_624
    assert config.get_total_params() - 2 * config.vocab_size * config.hidden_size == 18_915_328


@pytest.mark.parametrize("sparse", [False, True])
def test_create_gives_the_model_and_the_config_that_counts_it(sparse):
    model, config = create_pythia_70m(vocab_size=1000, use_sparse_attention=sparse, device="meta")
    assert config.get_total_params() == sum(p.numel() for p in model.parameters())
    assert config.sparse == ("local" if sparse else None)
    assert next(model.parameters()).device.type == "meta"


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model = replace(TINY_REPORT, dropout=0.5).build()
    ids = tokens(50, 2, 16)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_on_the_reports_card_the_naive_form_fails_where_the_model_takes_little():
    vocabulary, batch, length = REPORT_VOCAB_SIZE, REPORT.batch, REPORT.tokens
    config = replace(PRESETS["report"], vocab_size=vocabulary, seq_len=length)
    rows = text_batch(vocabulary, batch, length)
    naive = oomph.predict(oomph.Workload(lambda: NaivePythia(config), rows), gpu=REPORT.gpu)
    model = oomph.predict(oomph.Workload(config.build, rows), gpu=REPORT.gpu)
    assert naive.fits is False
    assert naive.refused.bytes == 8 * 8 * 512 * 512 * 64 * 4  # one repeated operand of a product
    assert max(a.bytes for a in naive.allocations) == 4 * vocabulary**2  # the identity matrix
    assert model.fits is True
    assert model.peak.allocated * 40 < naive.peak.allocated


def test_more_tokens_than_learned_positions_is_one_line():
    with pytest.raises(ArgumentError, match="input_ids has 25 tokens; the model has 24 learned positions"):
        TINY_REPORT.build()(tokens(50, 1, 25))
