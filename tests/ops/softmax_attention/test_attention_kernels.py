"""The Triton kernels (in Triton's interpreter where there is no GPU), and all kernels on a real GPU."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE

from oomph.errors import ArgumentError
from oomph.ops.common import explain
from oomph.ops.softmax_attention import BlockPattern, attention, locality_bias, sdpa
from oomph.ops.softmax_attention.reference import reference

pytest.importorskip("triton")


def tensors(queries, keys, dtype=torch.float32, batch=1, heads=2, key_heads=1, head=16, value=16):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_()

    return (
        random(batch, heads, queries, head),
        random(batch, key_heads, keys, head),
        random(batch, key_heads, keys, value),
    )


def compare(q, k, v, tolerance=1e-5, mask=None, **options):
    out = attention(q, k, v, impl="triton", key_mask=mask, **options)
    assert out.dtype == q.dtype
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    bias = options.pop("bias", None)
    if bias is not None:
        bias = replace(bias, query_points=bias.query_points.double(), key_points=bias.key_points.double())
    expected = reference(*wide, key_mask_BK=mask, bias=bias, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    got = torch.autograd.grad(out, (q, k, v), weight)
    right = torch.autograd.grad(expected, wide, weight.double())
    for a, b in zip((out, *got), (expected, *right), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=tolerance)


def padding(keys, *lengths):
    return torch.arange(keys, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]


def points_bias(queries, keys, size=2, batch=None, spread=1.0, shift=0.0, strength=10.0):
    generator = torch.Generator().manual_seed(3)
    shapes = ((queries, size), (keys, size) if batch is None else (batch, keys, size))
    t, s = (torch.rand(shape, generator=generator).to(DEVICE) * spread + shift for shape in shapes)
    return locality_bias(t, s, strength)


@pytest.mark.parametrize(
    ("pattern", "causal"),
    [
        (BlockPattern("local", block=16), True),
        (BlockPattern("local", block=48, window=0), False),
        (BlockPattern("global", block=16, stride=3), False),
        (BlockPattern("mixed", block=16, stride=3), True),
    ],
)
def test_patterns(pattern, causal):
    compare(*tensors(50, 50, heads=1), pattern=pattern, causal=causal)


@pytest.mark.parametrize(
    ("queries", "keys", "pattern", "causal"),
    [
        (13, 40, None, True),
        (1, 37, None, True),
        (40, 13, BlockPattern("mixed", block=16, window=0), True),
        (13, 60, BlockPattern("mixed", block=16, stride=3), False),
    ],
)
def test_different_lengths(queries, keys, pattern, causal):
    compare(*tensors(queries, keys, heads=1), pattern=pattern, causal=causal)


@pytest.mark.parametrize(
    ("pattern", "causal"), [(None, False), (None, True), (BlockPattern("global", block=16), True)]
)
def test_padding(pattern, causal):
    mask = padding(30, 0, 17, 30)
    compare(*tensors(30, 30, batch=3, heads=1), mask=mask, pattern=pattern, causal=causal)


@pytest.mark.parametrize("pattern", [None, BlockPattern("local", block=16)])
def test_key_mask_may_leave_rows_without_keys(pattern):
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[0, :20] = False
    compare(*tensors(40, 40, batch=2, heads=1), mask=mask.to(DEVICE), pattern=pattern, causal=True)


def test_grouped_heads_of_any_size():
    compare(*tensors(20, 33, heads=4, key_heads=2, head=20, value=40), causal=True)


def test_half_precision():
    compare(
        *tensors(70, 70, torch.float16, head=32, value=32),
        tolerance=4e-3,
        causal=True,
        pattern=BlockPattern("local"),
    )
    compare(*tensors(40, 40, torch.float16, head=32, value=32), tolerance=4e-3, bias=points_bias(40, 40))


def test_transposed_inputs_and_a_negative_scale():
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(2, 2, heads=9, key_heads=9))
    compare(q, k, v, scale=-0.3)


@pytest.mark.parametrize(
    ("queries", "keys", "causal"), [(37, 37, True), (13, 40, False), (40, 13, True), (3, 1, False)]
)
def test_locality_bias(queries, keys, causal):
    compare(*tensors(queries, keys, heads=1), bias=points_bias(queries, keys), causal=causal)


@pytest.mark.parametrize("size", [1, 8])
def test_locality_bias_with_other_dimensions_and_batched_points(size):
    options = {"heads": 2, "key_heads": 1, "head": 20, "value": 40}
    compare(*tensors(17, 20, batch=2, **options), bias=points_bias(17, 20, size, batch=2, spread=0.5))


def test_locality_bias_with_padding_and_patterns():
    q, k, v = tensors(30, 30, batch=2, heads=1)
    compare(q, k, v, mask=padding(30, 0, 17), bias=points_bias(30, 30))
    mask = (torch.rand(2, 30, generator=torch.Generator().manual_seed(2)) > 0.5).to(DEVICE)
    bias = points_bias(30, 30, batch=2)
    compare(q, k, v, mask=mask, pattern=BlockPattern("mixed", block=16, window=0), causal=True, bias=bias)


@pytest.mark.parametrize(
    ("spread", "shift", "tolerance"),
    [
        (1.0, 1000.0, 1e-5),  # differences are exact: the distance from 0 does not matter
        (100.0, 0.0, 1e-4),  # biases of -100000: most weights are 0, some rows follow their nearest key
    ],
)
def test_locality_bias_of_distant_points(spread, shift, tolerance):
    compare(*tensors(40, 40, heads=1), tolerance, bias=points_bias(40, 40, spread=spread, shift=shift))


def test_locality_bias_with_negative_and_zero_strength():
    q, k, v = tensors(20, 20)
    compare(q, k, v, bias=points_bias(20, 20, strength=-3.0))
    plain = attention(q, k, v, impl="triton")
    assert torch.equal(attention(q, k, v, impl="triton", bias=points_bias(20, 20, strength=0.0)), plain)


def test_nan_stays_in_its_row():
    q, k, v = tensors(20, 20)
    with torch.no_grad():
        q[0, 0, 3] = math.nan
    out = attention(q, k, v, causal=True, pattern=BlockPattern("local", block=16), impl="triton")
    assert torch.isnan(out[0, 0, 3]).all()
    assert torch.isfinite(out[0, 1]).all()
    assert torch.isfinite(out[0, 0, 4:]).all()


POINTS = torch.rand(5, 2, device=DEVICE)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ({}, {"bias": torch.zeros(5, 5, device=DEVICE)}, "a bias"),
        ({}, {"pattern": BlockPattern("local", block=24)}, "no multiple of 16"),
        ({"dtype": torch.float64}, {}, "no float64 kernel"),
        ({"head": 257}, {}, "head sizes above 256"),
        ({"queries": 0}, {}, "an empty tensor"),
        ({}, {"bias": lambda b, h, i, j: i - j}, "other than locality_bias"),
        ({}, {"bias": locality_bias(POINTS.double(), POINTS)}, "points that are not float32"),
        ({}, {"bias": locality_bias(POINTS.clone().requires_grad_(), POINTS)}, "need a gradient"),
        ({}, {"bias": points_bias(5, 5, size=9)}, "more than 8 coordinates"),
    ],
)
def test_unsupported_calls_are_refused_with_the_reason(shape, options, message):
    q, k, v = tensors(**{"queries": 5, "keys": 5, **shape})
    with pytest.raises(ArgumentError, match=f"impl='triton' cannot run .*{message}"):
        attention(q, k, v, impl="triton", **options)


@pytest.mark.skipif(DEVICE == "cuda", reason="is about the CPU")
def test_auto_never_chooses_the_interpreter():
    choice = explain(attention, *tensors(20, 20), pattern=BlockPattern("local", block=16))
    assert choice.impl == "chunked"
    assert "the interpreter is for tests" in choice.reason


# On a real GPU

gpu = pytest.mark.gpu


def on_gpu(queries, keys, head=64, dtype=torch.bfloat16):
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, head, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 2, keys, head, device="cuda", dtype=dtype, requires_grad=True) for _ in "kv")
    return q, k, v


def results(out, expected, q, k, v, wide):
    weight = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (q, k, v), weight))
    right = (expected, *torch.autograd.grad(expected, wide, weight.double()))
    return zip(got, right, strict=True)


def by_index(b, h, q_index, k_index):
    return -0.1 * (q_index - k_index).abs()


@gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize(
    ("options", "impl"),
    [
        ({}, None),
        ({"causal": True}, None),
        ({"padded": True}, "cudnn"),
        ({"padded": True, "causal": True}, "triton"),
        ({"points": True}, "triton"),
        ({"points": True, "causal": True}, "triton"),
        ({"points": True, "padded": True}, "triton"),
        ({"bias": by_index, "causal": True}, "chunked"),
        ({"pattern": BlockPattern("local"), "causal": True}, "triton"),
        ({"pattern": BlockPattern("global"), "causal": True}, "triton"),
        ({"pattern": BlockPattern("mixed", stride=3)}, "triton"),
        ({"pattern": BlockPattern("mixed", stride=3), "points": True, "padded": True}, "triton"),
        ({"pattern": BlockPattern("mixed", stride=3), "bias": by_index, "padded": True}, "chunked"),
    ],
)
@pytest.mark.parametrize(("queries", "keys"), [(257, 257), (320, 320), (129, 257)])
def test_gpu_agrees_with_the_reference(options, impl, queries, keys):
    q, k, v = on_gpu(queries, keys)
    options = dict(options)
    mask = padding(keys, 0, 200) if options.pop("padded", False) else None
    if options.pop("points", False):
        options["bias"] = locality_bias(*(torch.rand(n, 2, device="cuda") for n in (queries, keys)))
    choice = explain(attention, q, k, v, key_mask=mask, **options)
    assert impl is None or choice.impl == impl
    out = attention(q, k, v, key_mask=mask, **options)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, key_mask_BK=mask, **options)
    for a, b in results(out, expected, q, k, v, wide):
        assert (a.double() - b).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * b.abs().max()


@gpu
@pytest.mark.parametrize(
    ("head", "dtype"),
    [
        (32, torch.float16),
        (64, torch.bfloat16),
        (64, torch.float32),
        (80, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("spread", "shift"), [(1.0, 0.0), (1.0, 1000.0), (100.0, 0.0)])
def test_locality_bias_on_a_gpu(head, spread, shift, dtype):
    q, k, v = on_gpu(200, 333, head, dtype)
    t = torch.rand(200, 2, device="cuda") * spread + shift
    s = (torch.rand(333, 2, device="cuda") * spread)[None].repeat(2, 1, 1) + shift
    out = attention(q, k, v, bias=locality_bias(t, s), impl="triton")
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, bias=locality_bias(t.double(), s.double()))
    # In half precision the factors of products are rounded; a bias of -b is rounded by b / 2^24 in any.
    relative = 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * spread
    for a, b in results(out, expected, q, k, v, wide):
        assert (a.double() - b).abs().max() <= relative * max(1.0, b.abs().max())


@gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("batch", [1, 2])
def test_grouped_backward_on_a_gpu(backend, batch, monkeypatch):
    monkeypatch.setattr(sdpa, "_GROUP_BYTES", 1)
    torch.manual_seed(0)
    shapes = [(batch, 300, 8, 80), (batch, 300, 2, 80), (batch, 300, 2, 80)]
    leaves = [torch.randn(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes]
    out = attention(*(x.transpose(1, 2) for x in leaves), causal=True, impl=backend)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = attention(*(x.transpose(1, 2) for x in wide), causal=True, impl="reference")
    right = torch.autograd.grad(expected, wide, grad.double())
    for a, b in zip((out, *found), (expected, *right), strict=True):
        assert (a.double() - b).abs().max() < 0.02 * b.abs().max()
