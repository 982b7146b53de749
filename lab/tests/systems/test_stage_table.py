"""The table of a step's stages, of report 002's decoder."""

from dataclasses import replace

import pytest
import torch

import oomph
from oomph.report.stages import stage_table
from oomph_lab.systems.longctx import LongContextConfig
from oomph_lab.systems.longctx.naive import NaiveLongContext

pytestmark = pytest.mark.usefixtures("in_process")
MiB, GiB = 2**20, 2**30


def longctx_4b(kind, layers=2, tokens=131_072):
    config = replace(LongContextConfig.of("4B"), num_layers=layers)

    def batch(device):
        ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
        return {"input_ids": ids, "labels": ids}

    build = config.build if kind == "model" else lambda: NaiveLongContext(config, tokens)
    workload = oomph.Workload(build, batch, dtype="bfloat16", optimizer=None)
    if kind == "model":
        workload = oomph.apply("activation_checkpointing", workload)
    return config, {row.stage: row for row in stage_table(oomph.predict(workload))}


def test_the_naive_long_context_model_grows_as_arithmetic_says():
    config, rows = longctx_4b("naive")
    logits = 131_072 * config.vocab_size * 2
    caches = config.num_layers * 2 * 131_072 * config.head_dim * 2
    held = {one.what: one for one in rows["parameters"].added}
    assert held["parameters"].requested == 2 * config.get_total_params()
    assert held["buffers"].bytes == pytest.approx(caches, rel=1e-4)
    assert rows["after embedding"].added[0].bytes == 640 * MiB
    assert rows["after full forward"].added[0].bytes == logits
    # fp32 logits and their log-softmax; with one row, the shifted logits are no copy
    assert rows["peak of the loss"].change == pytest.approx(4 * logits, rel=1e-4)
    assert rows["saved for backward"].freed == pytest.approx(3 * logits, rel=1e-4)
    assert rows["peak of backward"].change == pytest.approx(4 * logits, rel=1e-4)


def test_the_model_adds_one_hidden_state_per_recomputed_layer_and_no_logits():
    tokens = 16_384
    config, rows = longctx_4b("model", tokens=tokens)
    states = tokens * config.hidden_size * 2
    workspace = 32 * MiB  # cuBLAS's, from its first product on
    assert {one.what for one in rows["parameters"].added} == {"parameters", "batch"}
    assert rows["after first layer"].change == pytest.approx(states + workspace, rel=0.02)
    assert rows["after all 2 layers"].change == pytest.approx(states, rel=0.02)
    assert rows["peak of the loss"].change < 2 * GiB < tokens * config.vocab_size * 2
