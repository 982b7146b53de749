"""Memory, through oomph.predict: states of all tokens never exist, and the peak is near the inputs' size."""

from __future__ import annotations

import pytest
import torch

import oomph
from oomph.ops.common import explain
from oomph.ops.state_space import chunked, selective_scan
from oomph.units import MiB


def predicted(
    batch=64, length=512, d=512, n=16, dtype=torch.bfloat16, direction="forward", gated=False, **options
):
    """(Prediction, bytes of the inputs with the incoming gradient and of all gradients, what was chosen)."""
    chosen, counted = [], []
    pair = [2] if direction == "both" else []

    def target():
        def normal(*shape, like=dtype):
            return torch.randn(*shape, device="cuda", dtype=like)

        given = {
            "x": normal(batch, length, d),
            "delta": normal(*pair, batch, length, d),
            "A": -normal(*pair, d, n, like=torch.float32).abs(),
            "B": normal(*pair, batch, length, n),
            "C": normal(*pair, batch, length, n),
            "D": normal(*pair, d, like=torch.float32),
        }
        if gated:
            given["z"] = normal(batch, length, d)
        g = normal(batch, length, d)
        for each in given.values():
            each.requires_grad_()
        more = {"delta_softplus": True, "direction": direction, **options}
        chosen.append(explain(selective_scan, **given, **more))
        own = sum(each.numel() * each.element_size() for each in given.values())
        counted.append(2 * own + g.numel() * g.element_size())

        def step():
            selective_scan(**given, **more).backward(g)
            for each in given.values():
                each.grad = None

        return step

    return oomph.predict(target, gpu="h200"), counted[0], chosen[0]


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_peak_is_less_than_twice_the_inputs_and_gradients(direction, gated):
    prediction, counted, choice = predicted(direction=direction, gated=gated)
    assert choice.impl == "triton"
    assert prediction.peak.allocated < 2 * counted
    assert max(each.bytes for each in prediction.allocations) <= 64 * MiB  # states of all tokens: 1 GiB


def test_plain_torch_holds_the_states_of_a_few_rows_and_one_chunk(monkeypatch):
    monkeypatch.setattr(chunked, "BUFFER_BYTES", {"cuda": MiB})
    prediction, _, choice = predicted(batch=8, length=64, d=64, chunk_size=32, dtype=torch.float64)
    assert choice.impl == "chunked"
    assert choice.reason.startswith("the kernels compute in float32")
    states = 8 * 64 * 64 * 16 * 8
    buffers = 3 * 33 * 4 * 64 * 16 * 8  # decays, states and their gradients of 4 rows
    assert max(each.bytes for each in prediction.allocations) == buffers < states


def test_memory_grows_no_faster_than_the_length_and_segments_cost_little():
    short, _, _ = predicted(batch=1, length=4096)
    long, _, _ = predicted(batch=1, length=8192)
    assert long.peak.allocated < 2.05 * short.peak.allocated
    prediction, counted, _ = predicted(batch=1, length=65_536)
    assert prediction.peak.allocated < 2 * counted


def test_longer_chunks_keep_fewer_states():
    def largest_states(chunk_size):
        prediction, _, _ = predicted(batch=8, chunk_size=chunk_size)
        shape = (1, 8, 512 // chunk_size, 512, 16)
        return [each for each in prediction.allocations if each.shape == shape]

    assert len(largest_states(32)) == len(largest_states(128)) == 3  # one a step
