"""The Triton kernels, in Triton's interpreter where there is no GPU: values, gradients, edges, choices."""

import math
from dataclasses import replace

import pytest
import torch

from oomph.errors import ArgumentError
from oomph.ops.common import explain
from oomph.ops.softmax_attention import attention, global_, local, locality_bias, mixed
from oomph.ops.softmax_attention.reference import reference
from oomph.ops.softmax_attention.triton_attention import tiles

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(queries, keys, dtype=torch.float32, batch=1, heads=2, key_heads=1, head=16, value=16):
    make = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=make).to(DEVICE, dtype).requires_grad_()

    return (
        random(batch, heads, queries, head),
        random(batch, key_heads, keys, head),
        random(batch, key_heads, keys, value),
    )


def compare(q, k, v, tolerance=1e-5, lengths=None, mask=None, **options):
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    padding = {"key_lengths": lengths, "key_mask": mask}
    out = attention(q, k, v, impl="triton", **padding, **options)
    assert out.dtype == q.dtype
    if lengths is not None:
        mask = torch.arange(k.shape[2], device=DEVICE) < lengths[:, None]
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


@pytest.mark.parametrize(
    ("pattern", "causal"),
    [
        (local(1, 16), True),
        (local(0, 48), False),
        (global_(2, 16), True),
        (global_(3, 16), False),
        (mixed(1, 3, 16), True),
        (mixed(1, 3, 16), False),
        (mixed(1, 2, 32), True),
    ],
)
def test_patterns_agree_with_the_reference(pattern, causal):
    compare(*tensors(50, 50, heads=1), pattern=pattern, causal=causal)


@pytest.mark.parametrize(("queries", "keys"), [(13, 40), (40, 13), (1, 37)])
@pytest.mark.parametrize("pattern", [None, local(1, 16), mixed(0, 2, 16)])
def test_queries_stand_at_the_last_keys(queries, keys, pattern):
    compare(*tensors(queries, keys, heads=1), pattern=pattern, causal=True)


@pytest.mark.parametrize(("queries", "keys"), [(13, 60), (40, 13)])
def test_a_pattern_without_causality_crosses_lengths(queries, keys):
    compare(*tensors(queries, keys, heads=1), pattern=mixed(1, 3, 16))


@pytest.mark.parametrize("pattern", [None, global_(2, 16)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_cut_the_keys_and_an_entry_may_have_none(pattern, causal):
    compare(*tensors(30, 30, batch=3, heads=1), lengths=[0, 17, 30], pattern=pattern, causal=causal)


@pytest.mark.parametrize("pattern", [None, local(1, 16)])
def test_a_mask_may_leave_rows_without_keys(pattern):
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[0, :20] = False
    compare(*tensors(40, 40, batch=2, heads=1), mask=mask.to(DEVICE), pattern=pattern, causal=True)


def test_heads_of_any_size_and_groups():
    compare(*tensors(20, 33, heads=4, key_heads=2, head=20, value=40), causal=True)


def test_half_precision_rounds_once_more_than_the_result():
    compare(*tensors(70, 70, torch.float16, head=32, value=32), tolerance=4e-3, causal=True, pattern=local(1))


def test_transposed_inputs_and_a_scale_below_zero():
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(2, 2, heads=9, key_heads=9))
    compare(q, k, v, scale=-0.3)


# The locality bias


def near(queries, keys, size=2, batch=None, spread=1.0, shift=0.0, strength=10.0):
    make = torch.Generator().manual_seed(3)
    shapes = ((queries, size), (keys, size) if batch is None else (batch, keys, size))
    t, s = (torch.rand(shape, generator=make).to(DEVICE) * spread + shift for shape in shapes)
    return locality_bias(t, s, strength)


@pytest.mark.parametrize(("queries", "keys"), [(37, 37), (13, 40), (40, 13), (1, 3), (3, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_locality_bias_agrees_with_the_reference(queries, keys, causal):
    compare(*tensors(queries, keys, heads=1), bias=near(queries, keys), causal=causal)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_points_may_have_other_dimensions_and_differ_over_the_batch(size):
    options = {"heads": 2, "key_heads": 1, "head": 20, "value": 40}
    compare(*tensors(20, 33, batch=2, **options), bias=near(20, 33, size, batch=2, spread=0.5))


@pytest.mark.parametrize("pattern", [None, mixed(0, 2, 16)])
def test_the_locality_bias_goes_with_padding_and_patterns(pattern):
    q, k, v = tensors(30, 30, batch=2, heads=1)
    compare(q, k, v, lengths=[0, 17], pattern=pattern, bias=near(30, 30))
    mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(2)) > 0.5
    compare(q, k, v, mask=mask.to(DEVICE), pattern=pattern, causal=True, bias=near(30, 30, batch=2))


@pytest.mark.parametrize(
    ("spread", "shift", "tolerance"),
    [
        (1.0, 1000.0, 1e-5),  # differences of what was given are exact: the distance from 0 does not matter
        (100.0, 0.0, 1e-4),  # biases of -100000: most weights are 0, some rows follow their nearest key
        (100.0, -5000.0, 1e-4),
    ],
)
def test_points_that_are_far_apart_or_far_from_zero_lose_nothing(spread, shift, tolerance):
    compare(*tensors(40, 40, heads=1), tolerance, bias=near(40, 40, spread=spread, shift=shift))


def test_a_strength_below_zero_draws_to_the_farthest_and_zero_is_no_bias():
    q, k, v = tensors(20, 20)
    compare(q, k, v, bias=near(20, 20, strength=-3.0))
    plain = attention(q, k, v, impl="triton")
    assert torch.equal(attention(q, k, v, impl="triton", bias=near(20, 20, strength=0.0)), plain)


def test_the_locality_bias_in_half_precision_rounds_only_what_it_always_rounds():
    compare(*tensors(70, 70, torch.float16, head=32, value=32), tolerance=4e-3, bias=near(70, 70))


def test_bias_functions_that_the_kernels_do_not_know_are_refused_with_the_reason():
    q, k, v = tensors(5, 5)
    points = torch.rand(5, 2, device=DEVICE)
    for bias, message in (
        (lambda b, h, i, j: i - j, "other than locality_bias"),
        (locality_bias(points.double(), points), "points that are not float32"),
        (locality_bias(points.clone().requires_grad_(), points), "need a gradient"),
        (near(5, 5, size=9), "more than 8 coordinates"),
    ):
        with pytest.raises(ArgumentError, match=f"impl='triton' cannot run this call .*{message}"):
            attention(q, k, v, impl="triton", bias=bias)


def test_a_nan_reaches_what_depends_on_it_and_nothing_else():
    q, k, v = tensors(20, 20)
    with torch.no_grad():
        q[0, 0, 3] = math.nan
    out = attention(q, k, v, causal=True, pattern=local(1, 16), impl="triton")
    assert torch.isnan(out[0, 0, 3]).all()
    assert torch.isfinite(out[0, 1]).all()
    assert torch.isfinite(out[0, 0, 4:]).all()


def test_frozen_inputs_get_no_gradient_and_backward_runs_twice():
    q, k, v = tensors(17, 17)
    q.requires_grad_(False)
    out = attention(q, k, v, causal=True, impl="triton").sum()
    out.backward(retain_graph=True)
    once = k.grad.clone()
    out.backward()
    assert q.grad is None
    torch.testing.assert_close(k.grad, 2 * once)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(5, 5)}, "a bias"),
        ({"pattern": local(1, 24)}, "no multiple of 16"),
        ({"dtype": torch.float64}, "no float64 kernel"),
        ({"head": 257}, "head sizes above 256"),
        ({"queries": 0}, "an empty tensor"),
    ],
)
def test_calls_that_the_kernels_cannot_run_are_refused_with_the_reason(change, message):
    shape = {name: change.pop(name) for name in ("dtype", "head", "queries") if name in change}
    q, k, v = tensors(shape.pop("queries", 5), 5, **shape)
    options = {
        name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in change.items()
    }
    with pytest.raises(ArgumentError, match=f"impl='triton' cannot run this call .*{message}"):
        attention(q, k, v, impl="triton", **options)


@pytest.mark.skipif(DEVICE == "cuda", reason="is about the CPU")
def test_a_cpu_is_never_given_the_interpreter_unasked():
    choice = explain(attention, *tensors(20, 20), pattern=local(1, 16))
    assert choice.impl == "chunked"
    assert "the interpreter is for tests" in choice.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [16, 64, 128, 256])
@pytest.mark.parametrize("points", [False, True])
def test_tiles_divide_every_block(dtype, head, points):
    for block in (16, 32, 48, 64, 128, 192, 512):
        chosen = tiles(dtype, head, block, points=points)
        for tile in (chosen.forward, chosen.query_gradient):
            assert block % tile.queries == 0
        for tile in (chosen.forward, chosen.query_gradient, chosen.key_gradient):
            assert block % tile.keys == 0
            assert min(tile.queries, tile.keys) >= 16
    for tile in vars(tiles(dtype, head, None, points=points)).values():
        assert 128 % tile.queries == 128 % tile.keys == 0


def test_points_changed_between_forward_and_backward_are_refused_by_the_kernels():
    q, k, v = tensors(20, 20)
    t, s = torch.rand(20, 1, device=DEVICE), torch.rand(20, 1, device=DEVICE)
    out = attention(q, k, v, bias=locality_bias(t, s), impl="triton")
    t.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
