"""Backward a few heads at a time: the same gradients, and the memory of a group."""

import pytest
import torch

import oomph
from oomph.ops import attention
from oomph.ops.softmax_attention import by_heads
from oomph.ops.softmax_attention.by_heads import attention_by_heads, key_heads_at_a_time


def leaves(*shapes, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_all_heads_at_once(key_heads, causal):
    q, k, v = leaves(*[(2, 6, 17, 8)] * 3)
    out = attention_by_heads(q, k, v, causal=causal, scale=0.3, backend="cpu", key_heads=key_heads)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, (q, k, v), grad))


def test_frozen_inputs_get_no_gradient_and_layouts_are_kept():
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in leaves(*[(2, 4, 5, 8)] * 3))
    q.requires_grad_()
    attention_by_heads(q, k, v, causal=True, scale=1.0, backend="cpu", key_heads=2).sum().backward()
    assert q.grad.stride() == q.stride()
    assert k.grad is None


@pytest.mark.parametrize(
    ("heads", "key_heads", "tokens", "expected"),
    [
        (32, 8, 131_072, 1),  # 320 MiB a key head
        (32, 8, 32_768, 4),
        (32, 8, 8_192, 8),  # little enough: all at once
        (6, 6, 131_072, 6),
    ],
)
def test_a_group_needs_at_most_half_a_gibibyte(heads, key_heads, tokens, expected):
    with torch.device("meta"):
        q = torch.empty(1, heads, tokens, 80, dtype=torch.bfloat16)
        k = torch.empty(1, key_heads, tokens, 80, dtype=torch.bfloat16)
    assert key_heads_at_a_time(q, k) == expected


@pytest.mark.parametrize("gpu", ["h200", "rtx4090"])  # cuDNN's kernels, and flash's
def test_the_peak_of_a_long_sequence_falls_by_what_the_other_groups_would_take(gpu, monkeypatch):
    def step():
        q, k = (
            torch.randn(1, h, 65_536, 80, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for h in (32, 8)
        )
        attention(q, k, k, causal=True).sum().backward()

    grouped = oomph.predict(step, gpu=gpu).peak.allocated
    monkeypatch.setattr(by_heads, "_ENOUGH", 2**60)
    whole = oomph.predict(step, gpu=gpu).peak.allocated
    assert whole - grouped > 0.7 * 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_on_a_gpu_are_those_of_float64(backend, batch, monkeypatch):
    monkeypatch.setattr(by_heads, "_ENOUGH", 1)
    shapes = [(batch, 300, 8, 80), (batch, 300, 2, 80), (batch, 300, 2, 80)]
    made = leaves(*shapes, dtype=torch.bfloat16, device="cuda")
    out = attention(*(x.transpose(1, 2) for x in made), causal=True, impl=backend)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, made, grad)
    exact = [x.detach().double().requires_grad_() for x in made]
    wanted_out = attention(*(x.transpose(1, 2) for x in exact), causal=True, impl="reference")
    wanted = torch.autograd.grad(wanted_out, exact, grad.double())
    for one, other in zip((out, *found), (wanted_out, *wanted), strict=True):
        assert (one.double() - other).abs().max() < 0.02 * other.abs().max()
