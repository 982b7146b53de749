"""Values and gradients of attention against the whole-matrix reference in float64."""

import itertools

import pytest
import torch

from oomph.ops.softmax_attention import BlockPattern, attention, locality_bias
from oomph.ops.softmax_attention.reference import reference

B, H, G, D = 2, 4, 2, 16
PATTERNS = {
    "none": None,
    "local": BlockPattern("local", block=8),
    "global": BlockPattern("global", block=8),
    "mixed": BlockPattern("mixed", block=8, stride=3),
}


def tensors(queries, keys, dtype=torch.float64, heads=G, value=D):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return random(B, H, queries, D), random(B, heads, keys, D), random(B, heads, keys, value)


def compare(q, k, v, inputs, key_mask=None, impl="chunked", budget="64KiB", **options):
    out = attention(q, k, v, key_mask=key_mask, impl=impl, memory_budget=budget, **options)
    expected = reference(q, k, v, key_mask_BK=key_mask, **options)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad(out, inputs, weight)
    right = torch.autograd.grad(expected, inputs, weight)
    for a, b in zip((out, *got), (expected, *right), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("lengths", "impl"),
    [((37, 37), "chunked"), ((13, 37), "chunked"), ((37, 13), "chunked"), ((1, 9), "chunked"),
     ((33, 33), "auto"), ((17, 13), "auto"), ((3, 1), "auto")],
)  # fmt: skip
def test_every_mask_and_bias(lengths, impl):
    queries, keys = lengths
    kinds = (None, "full", "row", "function")
    cases = itertools.product((False, True), PATTERNS.values(), (False, True))
    for number, (causal, pattern, padded) in enumerate(cases):
        mask = torch.arange(keys) < torch.tensor([[0], [max(1, keys - 3)]]) if padded else None
        # All with all for one pair of lengths; for the others, each mask with two kinds of bias.
        two = kinds[number % 4], kinds[(number + 1 + number // 4) % 4]
        for kind in kinds if lengths == (37, 37) else two:
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
            options = {"causal": causal, "pattern": pattern, "bias": bias, "key_mask": mask}
            compare(q, k, v, inputs, impl=impl, **options)


@pytest.mark.parametrize(("batched", "budget"), [(True, "8KiB"), (False, "16MiB")])  # many chunks, and one
def test_locality_bias_without_gradient(batched, budget):
    q, k, v = tensors(21, 19)
    t, s = (torch.rand(*((B,) if batched else ()), n, 3, dtype=torch.float64) for n in (21, 19))
    bias = locality_bias(t, s)
    for causal, pattern, padded in itertools.product((False, True), PATTERNS.values(), (False, True)):
        mask = torch.arange(19) < torch.tensor([[0], [16]]) if padded else None
        options = {"causal": causal, "pattern": pattern, "bias": bias, "key_mask": mask}
        compare(q, k, v, [q, k, v], budget=budget, **options)


@pytest.mark.parametrize(("spread", "shift"), [(1.0, 0.0), (1.0, 1000.0), (100.0, 0.0)])
def test_locality_bias_has_the_error_of_float32(spread, shift):
    q, k, v = (x.detach() for x in tensors(65, 65, torch.float32))
    t, s = (torch.rand(65, 2) * spread + shift for _ in range(2))
    expected = reference(q.double(), k.double(), v.double(), bias=locality_bias(t.double(), s.double()))
    error = (attention(q, k, v, bias=locality_bias(t, s)) - expected).abs().max().item()
    # A bias of -b is rounded by b / 2^24, and the nearest key of a row may be some way off.
    assert error <= 16 * torch.finfo(torch.float32).eps * max(1.0, spread)


def test_locality_bias_is_minus_ten_times_the_squared_distance():
    t, s = torch.rand(5, 2), torch.rand(7, 2)
    i, j = torch.arange(5)[:, None], torch.arange(7)
    got = locality_bias(t, s)(torch.tensor(0), torch.tensor(0), i, j)
    torch.testing.assert_close(got, -10 * torch.cdist(t, s) ** 2, atol=1e-5, rtol=1e-5)
    assert locality_bias(t.bfloat16(), s).query_points.dtype == torch.float32


def test_bias_function_gradient_in_half_precision_is_summed_in_float32():
    class Slope:
        def __init__(self, slope):
            self.slope, self.tensors = slope, (slope,)

        def __call__(self, b, h, q_index, k_index):
            return self.slope * (k_index % 2)

    q, k, v = torch.zeros(1, 1, 300, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)
    v[:, :, 1] = 1.0  # every query adds 4 * (1/2 * 1/2) = 1 to the slope's gradient
    slope = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    attention(q, k, v, bias=Slope(slope), impl="chunked", memory_budget=1).sum().backward()
    assert slope.grad == 300  # a sum in bfloat16 ends at 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", ["auto", "chunked"])
def test_low_precision_error_is_that_of_rounding_the_result(dtype, impl):
    q, k, v = tensors(65, 65, dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, causal=True, impl=impl)
    expected = reference(*wide, causal=True)
    assert out.dtype == dtype
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad(out, (q, k, v), weight)
    right = torch.autograd.grad(expected, wide, weight.double())
    for a, b in zip((out, *got), (expected, *right), strict=True):
        # "chunked" rounds the result once; the fused kernel also rounds weights and partial results.
        factor = 1.0 if impl == "chunked" and dtype != torch.float32 else 8.0
        error = (a.double() - b).abs().max().item()
        assert error <= factor * torch.finfo(dtype).eps * b.abs().max().item()
