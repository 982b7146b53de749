"""The top line at the peak of each program is the one that causes its memory bottleneck."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import planted_programs
import pytest

import oomph
from oomph.records import Prediction

pytestmark = pytest.mark.usefixtures("in_process")

FILE = planted_programs.__file__
LINES = {
    line.split("# PLANTED: ")[1]: number
    for number, line in enumerate(Path(FILE).read_text().splitlines(), start=1)
    if "  # PLANTED: " in line
}
OTHER_GPUS = {
    "wide_mlp": "rtx3090",
    "upsampling": "rtx4090",
    "loop_over_layers": "a100-80gb",
    "float_logits": "l4",
}
# program: module, stage, op and shape of the largest tensor that the planted line made.
LARGEST = {
    "eager_attention": ("attention", "forward activations", "aten._softmax", (2, 16, 8192, 8192)),
    "one_hot_identity": ("", "forward activations", "aten.eye", (32768, 32768)),
    "float_logits": ("", "loss", "aten._log_softmax", (16384, 128256)),
    "shifted_logits_copy": ("", "loss", "aten.clone", (16, 1023, 50304)),
    "mask_buffer": ("", "parameters", "buffer", (32768, 32768)),
    "rope_cache_per_layer": ("0", "parameters", "buffer", (2, 262144, 64)),
    "function_backward_temporary": ("", "backward", "aten.diag_embed", (1024, 1000, 1000)),
    "gather_from_expanded": ("", "backward", "aten.new_zeros", (8, 2048, 2048, 64)),
    "embedding_gradient": ("table", "gradients", "aten.embedding_dense_backward", (4_000_000, 128)),
    "greedy_optimizer": ("0", "optimizer state", "aten.clone", (4096, 4096)),
    "frozen_embedding": ("entities", "parameters", "parameter", (5_000_000, 256)),
    "large_batch": ("", "batch", "aten.randn", (8192, 3, 256, 256)),
    "full_resolution_convolution": ("stem", "forward activations", "aten.convolution", (16, 128, 512, 512)),
    "dropout_samples": ("", "forward activations", "aten.native_dropout", (32, 8192, 4096)),
    "wide_mlp": ("0.up", "forward activations", "aten.addmm", (65536, 8192)),
    "pairwise_differences": ("", "loss", "aten.sub.Tensor", (4096, 4096, 128)),
}


@cache
def prediction_of(name: str) -> Prediction:
    return oomph.predict(planted_programs.PROGRAMS[name], gpu=OTHER_GPUS.get(name, "h200"))


@pytest.mark.parametrize("name", LINES)
def test_the_planted_line_is_the_top_line_at_the_peak(name):
    prediction = prediction_of(name)
    lines = prediction.by_line()
    site, size = lines[0]
    assert (site.file, site.line) == (FILE, LINES[name]), lines[:4]
    assert size >= 1.25 * (lines[1][1] if len(lines) > 1 else 0)
    assert size >= 0.25 * prediction.peak.allocated
    if name in LARGEST:
        largest = next(alive.allocation for alive in prediction.at_peak if alive.allocation.site == site)
        assert (largest.module, largest.stage, largest.op, largest.shape) == LARGEST[name]


def test_every_program_marks_one_line():
    assert sorted(LINES) == sorted(planted_programs.PROGRAMS)


def test_outputs_kept_by_a_list_grow_with_every_step():
    prediction = prediction_of("kept_outputs")
    first, second, third = prediction.steps
    assert second.end - first.end == third.end - second.end == 65_536 * 4096 * 4
    assert prediction.peak.step == 3


def test_one_line_of_a_loop_sums_over_all_layers():
    prediction = prediction_of("loop_over_layers")
    top = prediction.by_line()[0][0]
    activations = [
        alive.allocation
        for alive in prediction.at_peak
        if alive.allocation.op == "aten.tanh" and alive.allocation.site == top and alive.allocation.saved
    ]
    # The peak falls into the backward of the last layer, whose own output has just gone.
    assert len(activations) == 23


def test_recomputed_tensors_belong_to_the_block_that_is_recomputed():
    recomputed = prediction_of("checkpointed_block").at_peak[0].allocation
    assert recomputed.module.startswith("blocks.")
    assert recomputed.stage == "backward"


def test_a_nested_function_is_named_in_full():
    site = prediction_of("comprehension").by_line()[0][0]
    assert site.function.startswith("ShiftMixer.forward.mixed")
