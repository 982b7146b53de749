"""The choice of a kernel is remembered for calls without masks; nothing it rests on may go stale."""

from __future__ import annotations

import pytest
import torch
from torch.backends import cuda

import oomph
from oomph.ops.common import explain
from oomph.ops.softmax_attention import attention, fused


@pytest.fixture
def asked(monkeypatch):
    """How often the rules were asked."""
    times = []
    rules = fused._find_backends
    monkeypatch.setattr(fused, "_remembered", {})
    monkeypatch.setattr(fused, "_find_backends", lambda p: times.append(p) or rules(p))
    return times


def call(queries=6, keys=6, causal=True, dtype=torch.float32, **options):
    q, k = (torch.randn(1, 2, n, 8, dtype=dtype) for n in (queries, keys))
    return attention(q, k, k, causal=causal, **options)


def test_the_same_call_asks_once(asked):
    for _ in range(3):
        call()
    assert len(asked) == 1


def test_what_the_rules_depend_on_is_asked_anew(asked):
    call()
    for change in ({"causal": False}, {"queries": 3}, {"keys": 9}, {"dtype": torch.float64}):
        before = len(asked)
        call(**change)
        assert len(asked) == before + 1
    assert call(queries=3, keys=6).shape == (1, 2, 3, 8)


def test_deterministic_algorithms_are_asked_anew(asked):
    call()
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    call()
    assert len(asked) == 2


def test_masks_and_predictions_are_never_remembered(asked):
    mask = torch.ones(1, 6, dtype=torch.bool)
    call(causal=False, key_mask=mask)

    def on_a_gpu():
        q = torch.empty(1, 2, 6, 64, dtype=torch.bfloat16, device="cuda")
        assert explain(attention, q, q, q, causal=True).impl == "cudnn"

    oomph.predict(on_a_gpu, gpu="h100-80gb")
    assert not fused._remembered


def test_lengths_that_grow_do_not_fill_the_memory(asked, monkeypatch):
    monkeypatch.setattr(fused, "_MOST_REMEMBERED", 4)
    for keys in range(1, 12):
        call(queries=1, keys=keys)
    assert len(fused._remembered) <= 4


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_one_kernel_is_allowed_and_the_switches_are_put_back(backend):
    def switches():
        return {name: is_on() for name, (is_on, _) in fused._SWITCHES.items()}

    cuda.enable_flash_sdp(False)
    try:
        before = switches()
        with fused._allowing(backend):
            assert [name for name, on in switches().items() if on] == [backend]
        assert switches() == before
    finally:
        cuda.enable_flash_sdp(True)
