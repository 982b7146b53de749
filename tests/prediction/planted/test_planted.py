"""Each program has one planted memory bottleneck; the top line at the peak must be that one.

The programs are in programs/; the line that causes the bottleneck ends in `# PLANTED`.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import oomph
from oomph.records import Prediction

PROGRAMS = Path(__file__).parent / "programs"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))
OTHER_GPUS = {
    "wide_mlp": "rtx3090",
    "upsampling": "rtx4090",
    "loop_over_layers": "a100-80gb",
    "float_logits": "l4",
}


def planted_line(name: str) -> tuple[str, int]:
    path = PROGRAMS / f"{name}.py"
    lines = [
        number
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.endswith("# PLANTED")
    ]
    assert len(lines) == 1, f"{path.name} must mark exactly one line"
    return str(path), lines[0]


@cache
def prediction_of(name: str) -> Prediction:
    path = PROGRAMS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"planted_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target = module.workload if hasattr(module, "workload") else module.train
    return oomph.predict(target, gpu=OTHER_GPUS.get(name, "h200"))


def test_there_are_at_least_twenty_programs():
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_the_planted_line_is_the_top_line_at_the_peak(name):
    prediction = prediction_of(name)
    lines = prediction.by_line()
    site, size = lines[0]
    assert (site.file, site.line) == planted_line(name), [
        (Path(line.file).name, line.line, f"{each / 2**20:.0f} MiB") for line, each in lines[:4]
    ]
    # Clearly, not by a hair: nothing else comes near it.
    assert size >= 1.25 * (lines[1][1] if len(lines) > 1 else 0)
    assert size >= 0.25 * prediction.peak.allocated


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


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_tensor_of_the_planted_line_says_what_it_is(name):
    found = [
        alive.allocation
        for alive in prediction_of(name).at_peak
        if alive.allocation.site
        and (alive.allocation.site.file, alive.allocation.site.line) == planted_line(name)
    ]
    assert found, "the planted line holds nothing at the peak"
    largest = found[0]
    assert (largest.module, largest.stage, largest.op, largest.shape) == LARGEST[name]


def test_outputs_kept_by_a_list_grow_with_every_step():
    first, second, third = prediction_of("kept_outputs").steps
    output = 65_536 * 4096 * 4
    assert second.end - first.end == third.end - second.end == output


def test_the_leak_puts_the_peak_into_the_last_step():
    assert prediction_of("kept_outputs").peak.step == 3
    assert prediction_of("gradient_hook").peak.step == 3


def test_one_line_of_a_loop_sums_over_all_layers():
    top = prediction_of("loop_over_layers").by_line()[0][0]
    activations = [
        alive.allocation
        for alive in prediction_of("loop_over_layers").at_peak
        if alive.allocation.op == "aten.tanh" and alive.allocation.site == top and alive.allocation.saved
    ]
    # The peak falls into the backward of the last layer, whose own output has just gone.
    assert len(activations) == 47


def test_recomputed_tensors_belong_to_the_block_that_is_recomputed():
    recomputed = prediction_of("checkpointed_block").at_peak[0].allocation
    assert recomputed.module.startswith("blocks.")
    assert recomputed.stage == "backward"


def test_a_nested_function_is_named_in_full():
    site = prediction_of("comprehension").by_line()[0][0]
    assert site.function.startswith("ShiftMixer.forward.mixed")
