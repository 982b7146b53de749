"""Report 003's check of its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomph.cli import npt_memory_check as check
from oomph.systems.npt import PRESETS

pytest.importorskip("transformers")

GiB = 2**30


@pytest.mark.parametrize("form", check.FORMS)
def test_all_forms_compute_the_same(form):
    assert check.largest_difference(form) < 1e-12


def test_the_sizes_are_right():
    rows = {what: pair for what, *pair in check.sizes()}
    assert rows["old approach, all tokens' deltas"] == ["344.00 GiB", "448.00 GiB"]
    assert rows["one token's delta, B=1"] == ["172 MiB", "224 MiB"]
    assert rows["one token's delta, B=4"] == ["688 MiB", "896 MiB"]
    assert rows["modulation"] == ["128 KiB", "128 KiB"]


def test_the_table_has_the_reports_rows_and_ours():
    names = [row.name for row in check.CONFIGURATIONS]
    assert names[:6] == [
        *("Original", "Basic optimization", "+ CPU offload", "+ FP16", "+ Fewer layers", "Small model"),
    ]
    assert names[6:] == ["Ours", "Ours, 8-bit base"]


# GPT-2 with two layers converted. The first one's input has no gradient: one layer keeps its weights.
GPT2 = replace(
    next(row for row in check.CONFIGURATIONS if row.model == "GPT-2"),
    config=replace(PRESETS["small"], convert_layers=2),
)


def test_the_reports_loop_keeps_a_weight_for_every_token_and_ours_keeps_none():
    kept = 512 * 768 * 3072 * 4  # W + dW
    assert check.reports_peak(GPT2) > kept > 4 * GiB
    assert check.our_peak(GPT2) < 1 * GiB


def test_a_few_tokens_tell_the_rest():
    traced = check._reports_peak(GPT2.config, "per token", 1, 10)
    assert check.reports_peak(replace(GPT2, length=10)) == pytest.approx(traced, rel=0.01)


def test_offloaded_deltas_come_back_and_are_kept():
    offloaded = replace(GPT2, form="per token, offloaded")
    assert check.reports_peak(offloaded) == pytest.approx(check.reports_peak(GPT2), rel=0.05)
