"""What nsa computes, checked by hand and by what must not matter: the reference itself, and its edges."""

import pytest
import torch
from sparse_cases import ODD, SMALL, inputs, learned

from oomph.ops.sparse_attention import nsa
from oomph.ops.sparse_attention.problem import Sizes
from oomph.ops.sparse_attention.reference import choose_blocks, importance


def sizes(block=64, span=32, stride=16, top_n=4, window=512):
    return Sizes(block, span, stride, top_n, window, 1.0)


def test_a_compressed_block_counts_for_a_block_as_often_as_they_share_strides():
    weights = torch.eye(9)[None, None, None]  # token t gives all its weight to compressed block t
    shared = importance(weights, 128 + 64, sizes())[0, 0]
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


def test_importance_is_summed_over_the_heads_of_a_group():
    weights = torch.rand(1, 2, 3, 5, 7, dtype=torch.float64)
    per_head = sum(importance(weights[:, :, g : g + 1], 128, sizes()) for g in range(3))
    torch.testing.assert_close(importance(weights, 128, sizes()), per_head)


def test_the_first_block_and_the_two_latest_are_chosen_whatever_their_importance():
    scores = torch.zeros(1, 1, 7 * 2, 7)  # blocks of two tokens
    scores[..., 2] = 1.0
    chosen = choose_blocks(scores, sizes(block=2, span=1, stride=1))[0, 0]
    assert chosen[13].tolist() == [True, False, True, False, False, True, True]
    assert chosen[12].tolist() == [True, False, True, False, False, True, True]


def test_equal_importances_go_to_the_lower_index():
    chosen = choose_blocks(torch.full((1, 1, 20, 10), 0.5), sizes(block=2, span=1, stride=1, top_n=5))[0, 0]
    assert chosen[19].nonzero().flatten().tolist() == [0, 1, 2, 8, 9]


def test_no_block_that_begins_after_a_token_is_chosen():
    chosen = choose_blocks(torch.rand(1, 1, 20, 10), sizes(block=2, span=1, stride=1, top_n=20))[0, 0]
    for t in range(20):
        assert chosen[t].nonzero().flatten().tolist() == list(range(t // 2 + 1))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("options", [SMALL, ODD])
def test_a_token_changes_nothing_before_it(impl, options):
    tensors, _ = inputs(60)
    weight = torch.randn(2, options["compress_block"], dtype=torch.float64)
    before = nsa(*tensors, compress=learned(weight), impl=impl, **options)
    # The ends of compressed blocks, of selected blocks and of windows, and the tokens beside them.
    for t in (7, 8, 11, 12, 15, 16, 23, 24, 31, 32, 47, 48, 59):
        changed = [x.clone() for x in tensors]
        for x in changed:
            x[:, t:] = torch.randn_like(x[:, t:]) * 3
        after = nsa(*changed, compress=learned(weight), impl=impl, **options)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-13)


def test_with_one_gate_open_the_window_is_plain_attention_to_the_nearest():
    (q, k, v, *_), _ = inputs(30, heads=2, key_heads=2)
    open_, shut = torch.ones(1, 30, 2, dtype=torch.float64), torch.zeros(1, 30, 2, dtype=torch.float64)
    out = nsa(q, k, v, shut, shut, open_, compress="mean", impl="chunked", **SMALL)
    t = torch.arange(30)
    near = (t <= t[:, None]) & (t > t[:, None] - SMALL["window"])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near)
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_selection_of_all_blocks_is_causal_attention():
    (q, k, v, *_), _ = inputs(50, heads=4, key_heads=1)
    open_, shut = torch.ones(1, 50, 4, dtype=torch.float64), torch.zeros(1, 50, 4, dtype=torch.float64)
    options = {**SMALL, "top_n": 100}
    out = nsa(q, k, v, shut, open_, shut, compress="mean", impl="chunked", **options)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_token_before_the_end_of_the_first_compressed_block_gets_zeros_from_compression(impl):
    (q, k, v, *_), _ = inputs(20)
    open_, shut = torch.ones(1, 20, 4, dtype=torch.float64), torch.zeros(1, 20, 4, dtype=torch.float64)
    out = nsa(q, k, v, open_, shut, shut, compress="mean", impl=impl, **SMALL)
    assert out[:, :7].abs().max() == 0
    torch.testing.assert_close(out[0, 7, :2], v[0, :8, :1].mean(0).expand(2, -1))


def test_the_mean_is_the_mean_of_each_block():
    tensors, _ = inputs(43, dtype=torch.float64)
    mean = nsa(*tensors, compress="mean", impl="chunked", **ODD)
    by_hand = nsa(*tensors, compress=lambda blocks: blocks.mean(2), impl="chunked", **ODD)
    torch.testing.assert_close(mean, by_hand)
