"""What attention promises besides its values: masks, edges, autograd's variations, choices, mistakes."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from oomph.errors import ArgumentError
from oomph.ops.common import explain
from oomph.ops.softmax_attention import BlockPattern, attention, global_, local, locality_bias, mixed
from oomph.ops.softmax_attention.reference import reference

IMPLS = ["auto", "chunked"]


def qkv(queries=12, keys=12, dtype=torch.float32, batch=2, heads=2):
    torch.manual_seed(0)
    return [torch.randn(batch, heads, n, 16, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)]


# Patterns


def test_the_local_pattern_keeps_the_blocks_that_report_001_counts():
    assert [local(1).count(length) for length in (128, 256, 512)] == [(4, 4), (10, 16), (22, 64)]


def test_the_causal_cut_keeps_the_lower_half_of_a_pattern():
    assert local(1).count(512, causal=True) == (8 + 7, 64)
    assert global_(2).count(256) == (4 * 2 + 2, 16)  # columns 0 and 2, and the diagonal in rows 1 and 3
    assert global_(2).key_blocks(3, 8, causal=True) == [0, 2, 3]
    assert mixed(1, 4).key_blocks(6, 9) == [0, 4, 5, 6, 7, 8]


def test_ragged_lengths_count_their_last_block():
    assert local(0).count(65) == (2, 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "diagonal"}, "kind='diagonal' is not valid"),
        ({"kind": "local", "block": 0}, "block=0 is not valid"),
        ({"kind": "local", "window": -1}, "window=-1 is not valid"),
        ({"kind": "global", "stride": 1.5}, "stride=1.5 is not valid"),
    ],
)
def test_a_wrong_pattern_is_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        BlockPattern(**wrong)


# Masks


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pattern", [None, local(1, 4), mixed(1, 2, 4)])
def test_a_causal_output_does_not_depend_on_later_keys(impl, pattern):
    q, k, v = qkv(20, 20)
    before = attention(q, k, v, causal=True, pattern=pattern, impl=impl)
    with torch.no_grad():
        k[:, :, 11:] += 3
        v[:, :, 11:] -= 5
    after = attention(q, k, v, causal=True, pattern=pattern, impl=impl)
    assert torch.equal(before[:, :, :11], after[:, :, :11])
    assert not torch.equal(before[:, :, 11:], after[:, :, 11:])


@pytest.mark.parametrize("impl", IMPLS)
def test_causality_is_aligned_at_the_last_key(impl):
    q, k, v = qkv(20, 20)
    whole = attention(q, k, v, causal=True, impl=impl)
    for newest in (1, 3):
        part = attention(q[:, :, -newest:], k, v, causal=True, impl=impl)
        torch.testing.assert_close(part, whole[:, :, -newest:])


@pytest.mark.parametrize("impl", IMPLS)
def test_queries_before_every_key_get_zeros(impl):
    q, k, v = qkv(9, 4)
    out = attention(q, k, v, causal=True, impl=impl)
    assert torch.all(out[:, :, :5] == 0)
    assert torch.all(out[:, :, 5:].abs().sum(-1) > 0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("causal", [False, True])
def test_an_entry_without_keys_gets_zeros_and_gives_zero_gradients(impl, causal):
    q, k, v = qkv()
    out = attention(q, k, v, causal=causal, key_lengths=torch.tensor([0, 5]), impl=impl)
    out.sum().backward()
    assert torch.all(out[0] == 0)
    for tensor in (q, k, v):
        assert torch.all(tensor.grad[0] == 0)
        assert torch.isfinite(tensor.grad).all()
    assert torch.all(k.grad[1, :, 5:] == 0)


def test_left_padding_with_causality_leaves_the_first_queries_without_keys():
    q, k, v = qkv()
    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[0, :4] = False
    out = attention(q, k, v, causal=True, key_mask=seen)
    assert torch.all(out[0, :, :4] == 0)
    torch.testing.assert_close(out, reference(q, k, v, causal=True, key_mask_BK=seen))


def test_a_bias_of_minus_infinity_is_a_mask():
    q, k, v = qkv()
    bias = torch.zeros(12, 12)
    bias[3] = -math.inf
    bias[:, 7] = -math.inf
    out = attention(q, k, v, bias=bias, impl="chunked")
    out.sum().backward()
    assert torch.all(out[:, :, 3] == 0)
    assert torch.all(v.grad[:, :, 7] == 0)
    assert torch.isfinite(q.grad).all()


# Edges


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)])
@pytest.mark.parametrize("pattern", [None, local(1, 4)])
def test_empty_tensors_give_empty_or_zero_results(impl, batch, queries, keys, pattern):
    q, k, v = qkv(queries, keys, batch=batch)
    out = attention(q, k, v, impl=impl, causal=True, pattern=pattern)
    out.sum().backward()
    assert out.shape == (batch, 2, queries, 16)
    assert torch.all(out == 0)
    assert all(torch.all(x.grad == 0) for x in (q, k, v))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_reaches_what_depends_on_it_and_nothing_else(impl):
    q, k, v = qkv()
    with torch.no_grad():
        q[0, 0, 3] = math.nan
    out = attention(q, k, v, impl=impl)
    assert torch.isnan(out[0, 0, 3]).all()
    assert torch.isfinite(out[1]).all()
    assert torch.isfinite(out[0, 0, :3]).all()


# Autograd


def test_frozen_inputs_get_no_gradient():
    q, k, v = qkv()
    for frozen in (q, k, v):
        q.grad = k.grad = v.grad = None
        frozen.requires_grad_(False)
        attention(q, k, v, impl="chunked").sum().backward()
        assert [x.grad is None for x in (q, k, v)] == [x is frozen for x in (q, k, v)]
        frozen.requires_grad_()


def test_nothing_is_recorded_without_gradients():
    q, k, v = qkv()
    with torch.no_grad():
        assert attention(q, k, v, impl="chunked").grad_fn is None


def test_backward_can_run_twice_on_a_retained_graph():
    q, k, v = qkv()
    out = attention(q, k, v, impl="chunked", bias=locality_bias(torch.rand(12, 2), torch.rand(12, 2))).sum()
    out.backward(retain_graph=True)
    once = q.grad.clone()
    out.backward()
    torch.testing.assert_close(q.grad, 2 * once)


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


def test_the_gradient_of_half_precision_bias_tensors_is_summed_in_float32_over_tiles():
    class Slope:
        def __init__(self, slope):
            self.slope, self.tensors = slope, (slope,)

        def __call__(self, b, h, q_index, k_index):
            return self.slope * (k_index % 2)

    q, k, v = torch.zeros(1, 1, 1000, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)
    v[:, :, 1] = 1.0  # every query adds 4 * (1/2 * 1/2) = 1 to the slope's gradient
    slope = torch.zeros((), dtype=torch.bfloat16, requires_grad=True)
    attention(q, k, v, bias=Slope(slope), impl="chunked", memory_budget=1).sum().backward()
    assert slope.grad == 1000


def test_checkpointing_gives_the_same_gradients():
    q, k, v = qkv()
    t = torch.rand(12, 2, requires_grad=True)

    def run(q, k, v, t):
        return attention(q, k, v, causal=True, bias=locality_bias(t * 2, torch.ones(12, 2)))

    expected = torch.autograd.grad(run(q, k, v, t).sum(), (q, k, v, t))
    got = torch.autograd.grad(checkpoint(run, q, k, v, t, use_reentrant=False).sum(), (q, k, v, t))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_gives_its_dtype(impl):
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k.bfloat16(), v, impl=impl)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert q.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), reference(q, k, v), atol=0.03, rtol=0.03)


# Dynamo itself looks at .grad of what a graph break returns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_caller_gets_the_same_values():
    q, k, v = qkv()
    bias = locality_bias(torch.rand(12, 2), torch.rand(12, 2))

    def call(q, k, v):
        return attention(q, k, v, causal=True, bias=bias) * 2

    torch.testing.assert_close(torch.compile(call, backend="eager")(q, k, v), call(q, k, v))


# Bias functions


def test_a_function_that_hides_a_gradient_is_refused():
    q, k, v = qkv()
    table = torch.randn(12, requires_grad=True)
    with pytest.raises(ArgumentError, match="does not list it"):
        attention(q, k, v, bias=lambda b, h, i, j: table[j])
    with torch.no_grad():
        attention(q, k, v, bias=lambda b, h, i, j: table[j])


def test_the_locality_bias_is_minus_ten_times_the_squared_distance():
    t, s = torch.rand(5, 2), torch.rand(7, 2)
    i, j = torch.arange(5)[:, None], torch.arange(7)
    got = locality_bias(t, s)(torch.tensor(0), torch.tensor(0), i, j)
    torch.testing.assert_close(got, -10 * torch.cdist(t, s) ** 2, atol=1e-5, rtol=1e-5)
    assert locality_bias(t.bfloat16(), s).query_points.dtype == torch.float32


@pytest.mark.parametrize(
    ("t", "s", "message"),
    [
        (torch.rand(5, 2), torch.rand(5, 3), "points of one dimension"),
        (torch.rand(5), torch.rand(5, 3), r"t is \(5,\); valid"),
        (torch.rand(5, 2), [1, 2], "s is list; valid"),
    ],
)
def test_points_that_do_not_match_are_refused(t, s, message):
    with pytest.raises(ArgumentError, match=message):
        locality_bias(t, s)


# Choices


def test_the_cpu_takes_the_fused_kernel_where_no_full_size_mask_is_needed():
    q, k, v = qkv()
    assert explain(attention, q, k, v, causal=True).impl == "sdpa"
    assert explain(attention, q, k, v, key_lengths=torch.tensor([1, 2])).impl == "sdpa"
    choice = explain(attention, q, k, v, causal=True, key_lengths=torch.tensor([1, 2]))
    assert choice.impl == "chunked"
    assert "padding together with causality" in choice.reason
    assert "the tensors are on cpu" in choice.reason


def test_a_bias_that_would_be_rounded_is_not_given_to_a_fused_kernel():
    q, k, v = qkv(dtype=torch.bfloat16)
    choice = explain(attention, q, k, v, bias=torch.zeros(12, 12))
    assert choice.impl == "chunked"
    assert "float32 bias would be rounded to bfloat16" in choice.reason


def test_the_tiles_are_part_of_the_choice():
    q, k, v = qkv(600, 600)
    # The fused CPU kernel on whole rows, where the bias needs no gradient.
    assert explain(attention, q, k, v, impl="chunked").settings == {"queries": 600}
    assert explain(attention, q, k, v, impl="chunked", causal=True).settings == {"queries": 256}
    assert explain(attention, q, k, v, impl="chunked", memory_budget="64KiB").settings["queries"] == 9
    bias = torch.zeros(600, 600, requires_grad=True)
    settings = explain(attention, q, k, v, bias=bias, impl="chunked").settings
    assert settings == {"batch": 2, "key_value_heads": 2, "queries": 256}


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impl": "fused"}, "impl='fused' is not valid; choose from 'auto'"),
        ({"impl": "flex"}, "impl='flex' cannot run this call .the tensors are on cpu"),
        ({"impl": "cudnn"}, "impl='cudnn' cannot run this call"),
        ({"impl": "sdpa", "pattern": local(1)}, "impl='sdpa' cannot run this call .* .a block pattern"),
        ({"memory_budget": -1}, "size '-1' is not valid"),
        ({"memory_budget": "12"}, "has no unit"),
        ({"scale": math.inf}, "scale=inf is not valid"),
        ({"bias": torch.zeros(5, 12)}, r"bias has shape \[5, 12\], which does not broadcast"),
        ({"bias": torch.zeros(1, 1, 1, 12, 12)}, "does not broadcast"),
        ({"bias": torch.zeros(12, 12, dtype=torch.int64)}, "bias has dtype torch.int64"),
        ({"bias": 3.0}, "bias is a float; valid"),
        ({"bias": locality_bias(torch.rand(11, 2), torch.rand(12, 2))}, r"t has shape \(11, 2\); valid here"),
        ({"pattern": "local"}, "pattern is a str; valid"),
        ({"key_lengths": [1, 2]}, "key_lengths is a list, not a tensor"),
        ({"key_lengths": torch.ones(3, dtype=torch.int64)}, r"key_lengths is torch.int64 \[3\]; valid"),
        ({"key_lengths": torch.ones(2)}, "key_lengths is torch.float32"),
        ({"key_lengths": torch.tensor([12, 13])}, "key_lengths has 13; valid: 0 to 12, the number of keys"),
        ({"key_lengths": torch.tensor([-1, 12])}, "key_lengths has -1; valid: 0 to 12"),
        ({"key_mask": torch.ones(2, 12)}, "key_mask is torch.float32"),
        ({"key_mask": torch.ones(2, 11, dtype=torch.bool)}, r"valid: torch.bool \[2, 12\]"),
        (
            {"key_mask": torch.ones(2, 12, dtype=torch.bool), "key_lengths": torch.tensor([1, 2])},
            "both given",
        ),
    ],
)
def test_a_wrong_option_is_named_with_what_is_valid(options, message):
    with pytest.raises(ArgumentError, match=message):
        attention(*qkv(), **options)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 2, 4), (2, 2, 4, 8), (2, 2, 4, 8)), "takes 4-dimensional tensors"),
        (((2, 2, 4, 8), (1, 2, 4, 8), (2, 2, 4, 8)), "batch sizes differ"),
        (((2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 5, 8)), "k and v differ"),
        (((2, 2, 4, 8), (2, 2, 4, 6), (2, 2, 4, 8)), "one head size"),
        (((2, 3, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)), "not a multiple of key/value heads"),
        (((2, 2, 4, 0), (2, 2, 4, 0), (2, 2, 4, 8)), "one head size, at least 1"),
    ],
)
def test_wrong_shapes_are_named(shapes, message):
    with pytest.raises(ArgumentError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes))


def test_mixed_dtypes_and_integers_are_refused():
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match="must have one dtype"):
        attention(q, k.double(), v)
    with pytest.raises(ArgumentError, match="q has dtype"):
        attention(q.long(), k, v)
