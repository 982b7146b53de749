"""What kda refuses, in one line that names the argument and what is valid."""

import pytest
import torch
from kda_inputs import NAMES, inputs

import oomph
from oomph.errors import ArgumentError
from oomph.ops.delta_attention import kda, precompute_updates
from oomph.units import MiB


def refused(message, tokens=6, **changes):
    given = inputs(2, tokens, dtype=torch.float32)
    given.update(changes)
    with pytest.raises(ArgumentError, match=message) as error:
        kda(**given)
    assert "\n" not in str(error.value)


X = torch.zeros


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"q is None, not a tensor", {"q": None}),
        (r"beta has dtype torch.int64; valid: float16", {"beta": X(2, 6, 2, dtype=torch.int64)}),
        (r"v has shape \[2, 6, 2\]; valid: \[B, T, H, d\]", {"v": X(2, 6, 2)}),
        (r"k has shape \[2, 6, 2, 4\]; valid: that of q, \[2, 6, 2, 5\]", {"k": X(2, 6, 2, 4)}),
        (r"log_alpha has shape \[2, 6, 2, 1\]; valid: that of q", {"log_alpha": X(2, 6, 2, 1)}),
        (r"v has shape \[2, 5, 2, 7\]; valid: \[2, 6, 2, dv\]", {"v": X(2, 5, 2, 7)}),
        (r"beta has shape \[2, 6\]; valid: \[2, 6, 2\]", {"beta": X(2, 6)}),
        (r"v 1 or more|head size", {"v": X(2, 6, 2, 0)}),
        (r"initial_state has shape \[2, 2, 7, 5\]; valid: \[2, 2, 5, 7\]", {"initial_state": X(2, 2, 7, 5)}),
        (
            r"initial_state has dtype torch.bfloat16; valid here: torch.float32",
            {"initial_state": X(2, 2, 5, 7, dtype=torch.bfloat16)},
        ),
        (r"one dtype", {"v": X(2, 6, 2, 7, dtype=torch.bfloat16)}),
        (r"one device", {"v": X(2, 6, 2, 7, device="meta")}),
        (r"scale=nan is not valid; choose a finite number", {"scale": float("nan")}),
        (r"mode='fast' is not valid; choose from 'auto', 'sequential'", {"mode": "fast"}),
        (r"impl='cuda' is not valid; choose from 'auto', 'torch'", {"impl": "cuda"}),
        (r"memory_chunk_size=0 is not valid; choose a number of tokens >= 1", {"memory_chunk_size": 0}),
        (r"memory_chunk_size=2.0 is not valid", {"memory_chunk_size": 2.0}),
        (r"memory_budget=-5", {"memory_budget": -5}),
        (r"memory_budget='much'", {"memory_budget": "much"}),
        (r"were both given", {"memory_budget": "1MiB", "memory_chunk_size": 64}),
        (r"leave it out of 'sequential'", {"mode": "sequential", "memory_chunk_size": 64}),
        (r"memory_budget is for mode='chunked'", {"mode": "scan", "memory_budget": "1MiB"}),
        (r"check=1 is not valid", {"check": 1}),
        (r"impl='reference' goes token by token", {"impl": "reference", "mode": "chunked"}),
        (r"impl='triton' has mode='chunked' only", {"impl": "triton", "mode": "scan"}),
        (r"a batch of 2; valid: packed sequences, B = 1", {"cu_seqlens": [0, 6]}),
    ],
)
def test_bad_arguments_are_named_with_what_is_valid(message, changes):
    refused(message, **changes)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_values_out_of_range_are_refused_on_the_cpu(impl):
    too_large = torch.full((2, 6, 2, 5), -1.0)
    too_large[1, 2, 0, 3] = 0.25
    refused(r"log_alpha has a value of 0.25; valid: <= 0", log_alpha=too_large, impl=impl)
    refused(r"beta has values from -0.5 to -0.5; valid: 0 to 1", beta=torch.full((2, 6, 2), -0.5), impl=impl)
    refused(r"beta has values from 0 to 1.5; valid: 0 to 1", beta=torch.linspace(0, 1.5, 24).view(2, 6, 2))


def test_unchecked_values_are_computed_as_written():
    given = inputs(2, 40)
    given["log_alpha"] = -0.1 * given["log_alpha"]
    given["beta"] = 2 * given["beta"]
    for ours, right in zip(
        kda(**given, check=False, mode="chunked"), kda(**given, check=False, mode="sequential"), strict=True
    ):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 4], r"cu_seqlens=\[0, 4\] is not valid; valid: rising from 0 to T = 6"),
        ([1, 6], "rising from 0"),
        ([0, 5, 3, 6], "rising from 0"),
        ([0, 7], "rising from 0"),
        ([0], "the N \\+ 1 ends"),
        ([0.0, 6.0], "integers"),
        ([[0, 6]], "the N \\+ 1 ends"),
        ("06", "the N \\+ 1 ends"),
        ([0, 1, 2, 3, 4, 5, 6, 5, 6], r"cu_seqlens=\[0, 1, 2, 3, 4, 5, \.\.\., 6\]"),
    ],
)
def test_malformed_ends_of_packed_sequences_are_refused(ends, message):
    given = inputs(1, 6)
    given.pop("initial_state")
    with pytest.raises(ArgumentError, match=message):
        kda(**given, cu_seqlens=ends)
    with pytest.raises(ArgumentError, match=r"initial_state has shape \[1, .*valid: \[2, "):
        kda(**inputs(1, 6), cu_seqlens=[0, 3, 6])


def test_the_kernels_are_refused_on_a_cpu_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused(r"impl='triton' cannot run this call \(.*cpu.*\); choose 'auto' or 'torch'", impl="triton")


def test_a_prediction_checks_shapes_and_never_values():
    def program():
        x = torch.ones(1, 32, 2, 16, device="cuda")
        kda(x, x, x, x, 5 * x[..., 0], check=True, impl="torch")

    assert oomph.predict(program, gpu="h200").peak.allocated < 64 * MiB


def test_precompute_updates_refuses_chunks_of_no_tokens():
    given = inputs(1, 6)
    with pytest.raises(ArgumentError, match="memory_chunk_size=0 is not valid"):
        precompute_updates(*(given[name] for name in NAMES[1:5]), memory_chunk_size=0)
