"""Values and gradients of nsa in plain torch against the float64 reference; the reference itself."""

import pytest
import torch
from nsa_inputs import ODD, SMALL, assert_close, call, inputs

from oomph.ops.sparse_attention import chunked, nsa
from oomph.ops.sparse_attention.arguments import NSAConfig
from oomph.ops.sparse_attention.reference import importance, select_blocks


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


def config(block=64, span=32, stride=16, top_n=4):
    return NSAConfig(block, span, stride, top_n, 512, 1.0)


def test_importance_counts_shared_strides():
    weights = torch.eye(9)[None, None, None]  # token t gives all its weight to compressed block t
    shared = importance(weights, 128 + 64, config())[0, 0]
    assert shared.tolist() == [
        [2, 0, 0],
        [2, 0, 0],
        [2, 0, 0],
        [1, 1, 0],  # strides 3 and 4: the last of block 0 and the first of block 1
        [0, 2, 0],
        [0, 2, 0],
        [0, 2, 0],
        [0, 1, 1],
        [0, 0, 2],
    ]


def test_the_first_block_and_the_two_latest_are_always_selected():
    scores = torch.zeros(1, 1, 7 * 2, 7)  # blocks of two tokens
    scores[..., 2] = 1.0
    chosen = select_blocks(scores, config(block=2, span=1, stride=1))[0, 0]
    assert chosen[13].tolist() == [True, False, True, False, False, True, True]
    assert chosen[12].tolist() == [True, False, True, False, False, True, True]


def test_equal_importances_go_to_the_lower_index():
    chosen = select_blocks(torch.full((1, 1, 20, 10), 0.5), config(block=2, span=1, stride=1, top_n=5))[0, 0]
    assert chosen[19].nonzero().flatten().tolist() == [0, 1, 2, 8, 9]


def test_no_block_after_a_token_is_selected():
    chosen = select_blocks(torch.rand(1, 1, 20, 10), config(block=2, span=1, stride=1, top_n=20))[0, 0]
    for t in range(20):
        assert chosen[t].nonzero().flatten().tolist() == list(range(t // 2 + 1))


def test_window_branch_is_attention_to_the_nearest_tokens():
    (q, k, v, *_), _ = inputs(30, heads=2, key_heads=2)
    open_, shut = torch.ones(1, 30, 2, dtype=torch.float64), torch.zeros(1, 30, 2, dtype=torch.float64)
    out = nsa(q, k, v, shut, shut, open_, compress="mean", impl="chunked", **SMALL)
    t = torch.arange(30)
    near = (t <= t[:, None]) & (t > t[:, None] - SMALL["window"])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_selecting_all_blocks_is_causal_attention():
    (q, k, v, *_), _ = inputs(50, heads=4, key_heads=1)
    open_, shut = torch.ones(1, 50, 4, dtype=torch.float64), torch.zeros(1, 50, 4, dtype=torch.float64)
    options = {**SMALL, "top_n": 100}
    out = nsa(q, k, v, shut, open_, shut, compress="mean", impl="chunked", **options)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


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
