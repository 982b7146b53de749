"""Predictions against memory measured on a real GPU and stored in benchmarks/results.

`make test` predicts 15 of the 81 measured workloads, one of each kind; `make accuracy` predicts all.
"""

import statistics
import warnings
from functools import cache

import pytest
import torch

import oomph
from oomph.prediction.ops.rules import RuleGuard

pytestmark = pytest.mark.usefixtures("in_process")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the models' own libraries
    from benchmarks.accuracy.rows import (
        ACCURACY,
        Comparison,
        changes,
        compare_rows,
        measured_rows,
        out_of_bounds,
    )
    from benchmarks.accuracy.workloads import ALL
    from benchmarks.rows import read

CHOSEN = """
    nanogpt-autocast tied-weights lora qwen3-moe bias-attention-bf16 checkpoint-selective save-on-cpu
    custom-function-autocast mlp-batchnorm-adagrad gradscaler-fp16 lstm held-graph-scatter
    held-embedding-bags unet-channels-last batchnorm-convnet
""".split()
MEASURED = measured_rows()
COMMITTED = {row.workload: row for row in read(ACCURACY, Comparison)}


@pytest.fixture(autouse=True)
def _strict_rules(monkeypatch):
    monkeypatch.setattr(RuleGuard, "strict", True)


@cache
def compared(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prediction = oomph.predict(ALL[name].target, gpu="h200")
    return compare_rows(MEASURED[name], prediction, torch.__version__, ALL[name].convolutions)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_prediction_agrees_with_the_gpu_and_with_the_committed_row(name):
    row = compared(name)
    assert out_of_bounds(row) == []
    assert changes(row, COMMITTED[name]) == []


def test_the_median_error_is_nearly_zero():
    rows = [compared(name) for name in CHOSEN]
    assert statistics.median(abs(row.allocated_error_percent) for row in rows) <= 0.3
    assert statistics.median(abs(row.reserved_error_percent) for row in rows) <= 1


def test_every_measured_workload_has_a_committed_row_within_its_bounds():
    assert set(COMMITTED) == set(MEASURED) == set(ALL)
    assert [row.workload for row in COMMITTED.values() if out_of_bounds(row)] == []
