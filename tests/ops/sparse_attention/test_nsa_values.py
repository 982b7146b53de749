"""Values and gradients of nsa in plain torch against the float64 reference; the reference itself."""

import pytest
import torch
from nsa_inputs import ODD, SMALL, assert_close, call, inputs

from oomph.ops.sparse_attention import chunked, nsa


@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 31, 127])
@pytest.mark.parametrize("options", [SMALL, ODD])
def test_values_and_gradients(tokens, options):
    case = inputs(tokens, batch=2)
    assert_close(call(*case, "chunked", **options), call(*case, "reference", **options), 1e-12)


@pytest.mark.parametrize("options", [SMALL, ODD])
def test_chunk_size_does_not_change_the_result(monkeypatch, options):
    case = inputs(53)
    expected = call(*case, "reference", **options)
    for tokens in (1, 5, 16):
        monkeypatch.setattr(chunked, "tokens_per_chunk", lambda *_, size=tokens: size)
        assert_close(call(*case, "chunked", **options), expected, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
def test_low_precision_error_is_that_of_rounding(dtype, tolerance):
    # All blocks selected: rounded scores cannot change the choice.
    options = {**SMALL, "top_n": 10}
    tensors, grad = inputs(60)
    tensors = [x.to(dtype).double() for x in tensors]
    got = call(tensors, grad, "chunked", dtype=dtype, **options)
    assert got[0].dtype == dtype
    assert_close(got, call(tensors, grad, "reference", **options), tolerance)


# The definition


@pytest.mark.parametrize("branch", ["selection", "window"])
def test_a_branch_alone_is_attention(branch):
    (q, k, v, *_), _ = inputs(50, heads=4, key_heads=1)
    open_, shut = torch.ones(1, 50, 4, dtype=torch.float64), torch.zeros(1, 50, 4, dtype=torch.float64)
    gates = (shut, open_, shut) if branch == "selection" else (shut, shut, open_)
    out = nsa(q, k, v, *gates, compress="mean", impl="chunked", **{**SMALL, "top_n": 100})
    t = torch.arange(50)
    seen = t <= t[:, None]
    if branch == "window":
        seen &= t > t[:, None] - SMALL["window"]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_equal_importances_go_to_the_lower_index():
    (q, k, v, *_), _ = inputs(160, heads=1, key_heads=1)
    open_, shut = torch.ones(1, 160, 1, dtype=torch.float64), torch.zeros(1, 160, 1, dtype=torch.float64)
    out = nsa(q * 0, k, v, shut, open_, shut, compress="mean", impl="reference", **SMALL)
    chosen = [0, 1, 8, 9]  # of ten blocks of 16: the first, the two latest, and one of equals
    right = torch.cat([v[:, 16 * block : 16 * block + 16] for block in chosen], 1).mean(1)
    torch.testing.assert_close(out[:, 159], right)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_compression_gives_zeros_before_the_first_block_ends(impl):
    (q, k, v, *_), _ = inputs(20)
    open_, shut = torch.ones(1, 20, 4, dtype=torch.float64), torch.zeros(1, 20, 4, dtype=torch.float64)
    out = nsa(q, k, v, open_, shut, shut, compress="mean", impl=impl, **SMALL)
    assert out[:, :7].abs().max() == 0
    torch.testing.assert_close(out[0, 7, :2], v[0, :8, :1].mean(0).expand(2, -1))


def test_mean_compression():
    tensors, _ = inputs(43, dtype=torch.float64)
    mean = nsa(*tensors, compress="mean", impl="chunked", **ODD)
    by_hand = nsa(*tensors, compress=lambda blocks: blocks.mean(2), impl="chunked", **ODD)
    torch.testing.assert_close(mean, by_hand)
