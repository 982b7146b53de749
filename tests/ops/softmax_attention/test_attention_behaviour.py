"""Attention, apart from its values: masks, edges, autograd, choice of a backend, memory, bad arguments."""

import math

import pytest
import torch

import oomph
from oomph.ops.common import explain
from oomph.ops.softmax_attention import BlockPattern, attention, locality_bias, sdpa
from oomph.ops.softmax_attention.reference import reference
from oomph.units import MiB

IMPLS = ["auto", "chunked"]
PADDING = torch.arange(12) < torch.tensor([[0], [5]])  # the keys of two sequences, of 12


def qkv(queries=12, keys=12, dtype=torch.float32, batch=2, heads=2):
    torch.manual_seed(0)
    return [torch.randn(batch, heads, n, 16, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)]


def test_pattern_counts_and_key_blocks():
    assert [BlockPattern("local").count(length) for length in (128, 256, 512)] == [(4, 4), (10, 16), (22, 64)]
    assert BlockPattern("local").count(512, causal=True) == (8 + 7, 64)
    assert BlockPattern("local", window=0).count(65) == (2, 4)  # the last block is short
    assert BlockPattern("global").count(256) == (
        4 * 2 + 2,
        16,
    )  # columns 0 and 2, and the diagonal in rows 1 and 3
    assert BlockPattern("global").key_blocks(3, 8, causal=True) == [0, 2, 3]
    assert BlockPattern("mixed", stride=4).key_blocks(6, 9) == [0, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("impl", IMPLS)
def test_causality_is_aligned_at_the_last_key(impl):
    q, k, v = qkv(20, 20)
    whole = attention(q, k, v, causal=True, impl=impl)
    for newest in (1, 3):
        part = attention(q[:, :, -newest:], k, v, causal=True, impl=impl)
        torch.testing.assert_close(part, whole[:, :, -newest:])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
def test_entry_without_keys_gets_zeros_and_gives_zero_gradients(impl, causal):
    q, k, v = qkv()
    out = attention(q, k, v, causal=causal, key_mask=PADDING, impl=impl)
    out.sum().backward()
    assert torch.all(out[0] == 0)
    for tensor in (q, k, v):
        assert torch.all(tensor.grad[0] == 0)
        assert torch.isfinite(tensor.grad).all()
    assert torch.all(k.grad[1, :, 5:] == 0)


def test_bias_of_minus_infinity_is_a_mask():
    q, k, v = qkv()
    bias = torch.zeros(12, 12)
    bias[3] = -math.inf
    bias[:, 7] = -math.inf
    out = attention(q, k, v, bias=bias, impl="chunked")
    out.sum().backward()
    assert torch.all(out[:, :, 3] == 0)
    assert torch.all(v.grad[:, :, 7] == 0)
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_stays_in_its_row(impl):
    q, k, v = qkv(40, 40)  # with fewer keys than a vector holds, torch's CPU kernel gives zeros for NaN
    with torch.no_grad():
        q[0, 0, 3] = math.nan
    out = attention(q, k, v, impl=impl)
    assert torch.isnan(out[0, 0, 3]).all()
    assert torch.isfinite(out[1]).all()
    assert torch.isfinite(out[0, 0, :3]).all()


@pytest.mark.parametrize("trained", [False, True])
def test_points_changed_between_forward_and_backward_are_refused(trained):
    q, k, v = qkv()
    t, s = torch.rand(12, 1), torch.rand(12, 1)
    t.requires_grad_(trained)
    out = attention(q, k, v, bias=locality_bias(t, s), impl="chunked")
    with torch.no_grad():
        s.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_gives_its_dtype(impl):
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k.bfloat16(), v, impl=impl)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), reference(q, k, v), atol=0.03, rtol=0.03)


# Choice of an implementation


def test_cpu_uses_the_fused_kernel_where_no_full_size_mask_is_needed():
    q, k, v = qkv()
    assert explain(attention, q, k, v, causal=True).impl == "sdpa"
    assert explain(attention, q, k, v, key_mask=PADDING).impl == "sdpa"
    choice = explain(attention, q, k, v, causal=True, key_mask=PADDING)
    assert choice.impl == "chunked"
    assert "padding together with causality" in choice.reason
    assert "no kernel of ours" in choice.reason
    half = (x.bfloat16() for x in (q, k, v))
    choice = explain(attention, *half, bias=torch.zeros(12, 12))
    assert choice.impl == "chunked"
    assert "float32 bias would be rounded to bfloat16" in choice.reason


def test_chunk_sizes_are_part_of_the_choice():
    q, k, v = qkv(600, 600)
    settings = explain(attention, q, k, v, impl="chunked").settings
    assert settings == {"batch": 2, "key_value_heads": 2, "queries": 256}
    settings = explain(attention, q, k, v, impl="chunked", memory_budget="64KiB").settings
    assert settings["batch"] == settings["key_value_heads"] == 1
    assert settings["queries"] < 256


def test_a_fused_kernel_is_traced_in_one_graph():
    q, k, v = qkv(4, 4)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, causal=True), attention(q, k, v, causal=True))


# Backward by groups of heads


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_backward_gives_the_gradients_of_all_heads_at_once(key_heads, causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, 17, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = sdpa.fused_attention(q, k, v, None, sdpa.FusedKernel("cpu", causal, 0.3, key_heads))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v), grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (q, k, v), grad))


@pytest.mark.parametrize("gpu", ["h200", "rtx4090"])  # cuDNN's kernels, and flash's
def test_grouped_backward_lowers_the_peak_of_a_long_sequence(gpu, monkeypatch):
    def step():
        q, k = (
            torch.randn(1, h, 65_536, 80, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for h in (32, 8)
        )
        attention(q, k, k, causal=True).sum().backward()

    grouped = oomph.predict(step, gpu=gpu).peak.allocated
    monkeypatch.setattr(sdpa, "_GROUP_BYTES", 2**60)
    whole = oomph.predict(step, gpu=gpu).peak.allocated
    assert whole - grouped > 0.7 * 2**30


# Memory and choice on a GPU, through oomph.predict


def over_inputs(
    length, chosen=None, dtype=torch.bfloat16, batch=1, points=False, padded=False, key_heads=8, **options
):
    """Bytes beyond q, k, v and the incoming gradient, for 8 heads of 64."""

    def target():
        q, g = (torch.randn(batch, 8, length, 64, device="cuda", dtype=dtype) for _ in range(2))
        k, v = (torch.randn(batch, key_heads, length, 64, device="cuda", dtype=dtype) for _ in range(2))
        more = dict(options)
        if points:
            more["bias"] = locality_bias(*(torch.rand(length, 2, device="cuda") for _ in range(2)))
        if padded:
            more["key_mask"] = torch.ones(batch, length, dtype=torch.bool, device="cuda")
        for tensor in (q, k, v):
            tensor.requires_grad_()
        assert chosen is None or explain(attention, q, k, v, **more).impl == chosen
        attention(q, k, v, **more).backward(g)

    peak = oomph.predict(target, gpu="h200").peak.allocated
    inputs = batch * length * 64 * (2 * 8 + 2 * key_heads) * dtype.itemsize
    return peak - inputs


@pytest.mark.parametrize(
    ("options", "impl"),
    [
        ({"causal": True}, "cudnn"),
        ({"key_heads": 2}, "cudnn"),
        ({"dtype": torch.float32, "key_heads": 2}, "efficient"),
        ({"padded": True}, "cudnn"),
        ({"padded": True, "dtype": torch.float32}, "efficient"),
        ({"padded": True, "causal": True}, "triton"),
        ({"points": True}, "triton"),
        ({"points": True, "padded": True, "pattern": BlockPattern("local"), "key_heads": 2}, "triton"),
        ({"pattern": BlockPattern("local"), "causal": True}, "triton"),
        ({"pattern": BlockPattern("local"), "dtype": torch.float32, "key_heads": 2}, "triton"),
        ({"dtype": torch.float64, "memory_budget": "8MiB"}, "chunked"),
        ({"impl": "chunked", "points": True, "causal": True, "memory_budget": "12MiB"}, "chunked"),
    ],
)
def test_memory_is_linear_in_the_length(options, impl):
    length = 512 if impl == "chunked" else 8192  # tracing chunks takes time
    small, large = (over_inputs(each, impl, **options) for each in (length // 2, length))
    assert large <= 2.05 * small  # a score matrix would quadruple
    assert impl == "chunked" or large < 8 * length * length  # a byte per score


@pytest.mark.parametrize(
    ("options", "expected", "tolerance"),
    [  # measured on an H200; the Triton kernels: out 64, lse 2, delta 2 and three gradients of 64 MiB
        ({}, 388, 0.01),
        ({"impl": "flash"}, 516, 0.01),
        ({"dtype": torch.float32}, 774, 0.01),
        ({"padded": True}, 388.1, 0.001),
        ({"points": True, "impl": "triton"}, 260, 0.001),
        ({"padded": True, "causal": True}, 260, 0.001),
    ],
)
def test_predicted_memory_is_the_measured(options, expected, tolerance):
    assert over_inputs(1024, batch=64, **options) == pytest.approx(expected * MiB, rel=tolerance)
