"""The Triton kernels (in Triton's interpreter where there is no GPU), and all kernels on a real GPU."""

import math
from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE

from oomph.errors import ArgumentError
from oomph.ops.common import explain
from oomph.ops.softmax_attention import BlockPattern, LocalityBias, attention, locality_bias, sdpa
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


def local(block=16, **options):
    return BlockPattern("local", block=block, **options)


def some_keys():
    """Leaves rows without keys."""
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[0, :20] = False
    return mask.to(DEVICE)


MIXED = BlockPattern("mixed", block=16, stride=3)
CASES = {  # the inputs, the options
    "local, causal": ({}, {"pattern": local(), "causal": True}),
    "local, blocks of 48": ({}, {"pattern": local(48, window=0)}),
    "global": ({}, {"pattern": BlockPattern("global", block=16, stride=3)}),
    "mixed, causal": ({}, {"pattern": MIXED, "causal": True}),
    "fewer queries": ({"queries": 13, "keys": 40}, {"causal": True}),
    "one query": ({"queries": 1, "keys": 37}, {"causal": True}),
    "fewer keys": (
        {"queries": 40, "keys": 13},
        {"pattern": BlockPattern("mixed", block=16, window=0), "causal": True},
    ),
    "fewer queries, mixed": ({"queries": 13, "keys": 60}, {"pattern": MIXED}),
    "padding, causal": ({"batch": 3}, {"mask": padding(50, 0, 17, 50), "causal": True}),
    "padding, global": (
        {"batch": 3},
        {"mask": padding(50, 0, 17, 50), "pattern": BlockPattern("global", block=16), "causal": True},
    ),
    "any mask, local": (
        {"batch": 2, "queries": 40, "keys": 40},
        {"mask": some_keys(), "pattern": local(), "causal": True},
    ),
    "grouped heads of any size": (
        {"queries": 20, "keys": 33, "heads": 4, "key_heads": 2, "head": 20, "value": 40},
        {"causal": True},
    ),
    "half precision": (
        {"queries": 70, "keys": 70, "dtype": torch.float16, "head": 32, "value": 32},
        {"tolerance": 4e-3, "causal": True, "pattern": BlockPattern("local")},
    ),
    "points": ({}, {"bias": points_bias(50, 50), "causal": True}),
    "points in half precision": (
        {"dtype": torch.float16, "head": 32, "value": 32},
        {"tolerance": 4e-3, "bias": points_bias(50, 50)},
    ),
    "points, fewer queries": ({"queries": 13, "keys": 40}, {"bias": points_bias(13, 40)}),
    "points, fewer keys": ({"queries": 40, "keys": 13}, {"bias": points_bias(40, 13), "causal": True}),
    "points, one key": ({"queries": 3, "keys": 1}, {"bias": points_bias(3, 1)}),
    "points on a line": ({"batch": 2}, {"bias": points_bias(50, 50, 1, batch=2, spread=0.5)}),
    "points of eight dimensions": (
        {"batch": 2, "queries": 20, "keys": 50, "head": 20, "value": 40},
        {"bias": points_bias(20, 50, 8, batch=2, spread=0.5)},
    ),
    "points, padding": ({"batch": 2}, {"mask": padding(50, 0, 17), "bias": points_bias(50, 50)}),
    "points, any mask, mixed": (
        {"batch": 2, "queries": 40, "keys": 40},
        {"mask": some_keys(), "pattern": MIXED, "causal": True, "bias": points_bias(40, 40, batch=2)},
    ),
    "points of negative strength": ({}, {"bias": points_bias(50, 50, strength=-3.0)}),
    # Differences are exact: the distance from 0 does not matter.
    "points far from zero": ({}, {"bias": points_bias(50, 50, shift=1000.0)}),
    # Biases of -100000: most weights are 0, some rows follow their nearest key.
    "distant points": (
        {"queries": 40, "keys": 40},
        {"tolerance": 1e-4, "bias": points_bias(40, 40, spread=100.0)},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case):
    shape, options = case
    compare(*tensors(**{"queries": 50, "keys": 50, "heads": 1, **shape}), **options)


def test_transposed_inputs_and_a_negative_scale():
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(2, 2, heads=9, key_heads=9))
    compare(q, k, v, scale=-0.3)


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


def compare_on_gpu(q, k, v, relative, least=0.0, bias=None, mask=None, **options):
    out = attention(q, k, v, bias=bias, key_mask=mask, **options)
    options.pop("impl", None)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if isinstance(bias, LocalityBias):
        bias = replace(bias, query_points=bias.query_points.double(), key_points=bias.key_points.double())
    expected = reference(*wide, key_mask_BK=mask, bias=bias, **options)
    weight = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (q, k, v), weight))
    right = (expected, *torch.autograd.grad(expected, wide, weight.double()))
    for a, b in zip(got, right, strict=True):
        assert (a.double() - b).abs().max() <= relative * max(least, b.abs().max())


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
    compare_on_gpu(q, k, v, 4 * torch.finfo(torch.bfloat16).eps, mask=mask, **options)


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
    # In half precision the factors of products are rounded; a bias of -b is rounded by b / 2^24 in any.
    relative = 4 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps * spread
    compare_on_gpu(q, k, v, relative, 1.0, bias=locality_bias(t, s), impl="triton")


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
