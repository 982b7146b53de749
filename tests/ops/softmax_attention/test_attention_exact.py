"""attention against the whole-matrix reference in float64: outputs and every gradient."""

import itertools

import pytest
import torch

from oomph.ops.softmax_attention import attention, global_, local, locality_bias, mixed
from oomph.ops.softmax_attention.reference import reference

B, H, G, D = 2, 4, 2, 16
PATTERNS = {"none": None, "local": local(1, 8), "global": global_(2, 8), "mixed": mixed(1, 3, 8)}


def tensors(queries, keys, dtype=torch.float64, heads=G, value=D, seed=0):
    make = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype).requires_grad_()

    return random(B, H, queries, D), random(B, heads, keys, D), random(B, heads, keys, value)


def compare(q, k, v, inputs, tolerance=1e-10, key_lengths=None, impl="chunked", budget="64KiB", **options):
    key_mask = None if key_lengths is None else torch.arange(k.shape[2]) < key_lengths[:, None]
    out = attention(q, k, v, key_lengths=key_lengths, impl=impl, memory_budget=budget, **options)
    expected = reference(q, k, v, key_mask_BK=key_mask, **options)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(out, inputs, weight)
    right = torch.autograd.grad(expected, inputs, weight)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("lengths", "impl"),
    [
        ((37, 37), "chunked"),
        ((13, 37), "chunked"),
        ((37, 13), "chunked"),
        ((1, 9), "chunked"),
        ((33, 33), "auto"),
        ((17, 13), "auto"),
        ((3, 1), "auto"),
    ],
)
def test_every_mask_and_bias_agrees_with_the_reference(lengths, impl):
    queries, keys = lengths
    for causal, pattern, padded in itertools.product((False, True), PATTERNS.values(), (False, True)):
        key_lengths = torch.tensor([0, max(1, keys - 3)]) if padded else None
        for kind in (None, "full", "row", "function"):
            q, k, v = tensors(queries, keys)
            inputs = [q, k, v]
            bias = None
            if kind == "full":
                bias = torch.randn(1, H, queries, keys, dtype=torch.float64, requires_grad=True)
            elif kind == "row":
                bias = torch.randn(keys, dtype=torch.float64, requires_grad=True)
            elif kind == "function":
                t = torch.rand(queries, 2, dtype=torch.float64, requires_grad=True)
                s = torch.rand(B, keys, 2, dtype=torch.float64, requires_grad=True)
                bias = locality_bias(t, s)
                inputs += [t, s]
            if isinstance(bias, torch.Tensor):
                inputs.append(bias)
            compare(
                q, k, v, inputs, key_lengths=key_lengths, impl=impl, causal=causal, pattern=pattern, bias=bias
            )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("budget", ["4KiB", "16MiB"])  # many tiles, and one
def test_points_without_a_gradient_agree_with_the_reference(batched, budget):
    q, k, v = tensors(37, 33)
    t, s = (torch.rand(*((B,) if batched else ()), n, 3, dtype=torch.float64) for n in (37, 33))
    bias = locality_bias(t, s)
    for causal, pattern, padded in itertools.product((False, True), PATTERNS.values(), (False, True)):
        lengths = torch.tensor([0, 30]) if padded else None
        options = {"causal": causal, "pattern": pattern, "bias": bias, "key_lengths": lengths}
        compare(q, k, v, [q, k, v], budget=budget, **options)


@pytest.mark.parametrize(("spread", "shift"), [(1.0, 0.0), (1.0, 1000.0), (100.0, 0.0)])
def test_the_error_of_a_locality_bias_is_that_of_single_precision(spread, shift):
    q, k, v = (x.detach() for x in tensors(65, 65, torch.float32))
    t, s = (torch.rand(65, 2) * spread + shift for _ in range(2))
    expected = reference(q.double(), k.double(), v.double(), bias=locality_bias(t.double(), s.double()))
    error = (attention(q, k, v, bias=locality_bias(t, s)) - expected).abs().max().item()
    # A bias of -b is rounded by b / 2^24, and the nearest key of a row may be some way off.
    assert error <= 16 * torch.finfo(torch.float32).eps * max(1.0, spread)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_key_value_heads_are_shared_by_neighbouring_query_heads(heads):
    q, k, v = tensors(21, 21, heads=heads)
    compare(q, k, v, [q, k, v], causal=True)
    compare(q, k, v, [q, k, v], impl="auto")


def test_the_value_head_size_may_differ():
    q, k, v = tensors(21, 30, value=5)
    compare(q, k, v, [q, k, v], impl="auto")


@pytest.mark.parametrize("budget", ["1KiB", "8KiB", "100KiB", "64MiB"])
def test_the_budget_does_not_change_the_result(budget):
    q, k, v = tensors(50, 70)
    expected = reference(q, k, v, causal=True)
    out = attention(q, k, v, causal=True, memory_budget=budget, impl="chunked")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(B, H, 9, 11), (1, 1, 9, 11), (H, 1, 11), (9, 1), (1,), (B, 1, 1, 11)])
def test_the_gradient_of_a_bias_has_the_shape_of_the_bias(shape):
    q, k, v = tensors(9, 11)
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    compare(q, k, v, [q, k, v, bias], bias=bias, impl="auto")


def test_a_function_may_depend_on_batch_and_head():
    q, k, v = tensors(9, 11)
    slope = torch.randn(B, H, dtype=torch.float64)
    compare(q, k, v, [q, k, v], bias=lambda b, h, i, j: slope[b, h] * (i - j).abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["auto", "chunked"])
def test_the_error_in_low_precision_is_that_of_rounding_the_result(dtype, impl):
    q, k, v = tensors(65, 65, dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, causal=True, impl=impl)
    expected = reference(*wide, causal=True)
    assert out.dtype == dtype
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(out, (q, k, v), weight)
    right = torch.autograd.grad(expected, wide, weight.double())
    for a, b in zip((out, *got), (expected, *right), strict=True):
        scale = b.abs().max().item()
        # One rounding of the result by chunks; the fused kernel also rounds weights and partial results.
        factor = 1.0 if impl == "chunked" and dtype != torch.float32 else 8.0
        assert (a.double() - b).abs().max().item() <= factor * torch.finfo(dtype).eps * scale


def test_inputs_need_not_be_contiguous():
    q, k, v = (torch.randn(B, 19, H, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for impl in ("auto", "chunked"):
        views = [x.transpose(1, 2) for x in (q, k, v)]
        compare(*views, [q, k, v], impl=impl, causal=True)
    wide = torch.randn(B, H, 19, 2 * D, dtype=torch.float64)[..., ::2].requires_grad_()
    compare(wide, wide, wide, [wide], impl="chunked")


def test_the_scale_can_be_given():
    q, k, v = tensors(9, 9)
    for impl in ("auto", "chunked"):
        compare(q, k, v, [q, k, v], scale=0.3, impl=impl)
        compare(q, k, v, [q, k, v], scale=-1, impl=impl)
