"""The blocks that language models share."""

import weakref

import torch
from torch import nn

from oomph.nn import RotaryEmbedding
from oomph_lab.systems.blocks import MLP, Block, CausalAttention, Residual


def test_grouped_attention_equals_attention_with_repeated_keys_and_values():
    torch.manual_seed(0)
    layer = CausalAttention(24, 4, 2, 6).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    q = layer.q_proj(x).unflatten(-1, (4, 6)).transpose(1, 2)
    k, v = (
        proj(x).unflatten(-1, (2, 6)).transpose(1, 2).repeat_interleave(2, 1)
        for proj in (layer.k_proj, layer.v_proj)
    )
    scores = (q @ k.mT / 6**0.5).masked_fill(torch.ones(11, 11).triu(1).bool(), float("-inf"))
    expected = layer.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x), expected)


def test_a_fused_projection_computes_what_three_projections_do():
    torch.manual_seed(0)
    rotary = RotaryEmbedding(8, fraction=0.5, heads_first=False)
    for given in (None, rotary):
        apart = CausalAttention(16, 4, 2, 8, rotary=given, bias=True).double()
        fused = CausalAttention(16, 4, 2, 8, rotary=given, bias=True, fused_projection=True).double()
        parts = (apart.q_proj, apart.k_proj, apart.v_proj)
        with torch.no_grad():
            fused.qkv_proj.weight.copy_(torch.cat([part.weight for part in parts]))
            fused.qkv_proj.bias.copy_(torch.cat([part.bias for part in parts]))
        fused.o_proj.load_state_dict(apart.o_proj.state_dict())
        table = None if given is None else rotary(torch.arange(9), dtype=torch.float64)
        x = torch.randn(2, 9, 16, dtype=torch.float64)
        y = fused(x, table)
        torch.testing.assert_close(y, apart(x, table))
        y.square().sum().backward()
        apart(x, table).square().sum().backward()
        expected = torch.cat([part.weight.grad for part in parts])
        torch.testing.assert_close(fused.qkv_proj.weight.grad, expected)


def test_what_a_fused_projection_gave_does_not_outlive_its_rotation():
    rotary = RotaryEmbedding(8, heads_first=False)
    layer = CausalAttention(16, 2, rotary=rotary, fused_projection=True)
    projected = []
    layer.qkv_proj.register_forward_hook(lambda module, args, y: projected.append(weakref.ref(y)))
    y = layer(torch.randn(1, 9, 16), rotary(torch.arange(9)))
    assert y.requires_grad
    assert projected[0]() is None


def test_a_parallel_block_adds_both_branches_to_one_stream():
    torch.manual_seed(0)
    attention, mlp = (
        Residual(nn.LayerNorm(8), CausalAttention(8, 2)),
        Residual(nn.LayerNorm(8), MLP(8, 16, "gelu")),
    )
    x = torch.randn(1, 5, 8)
    expected = x + attention.inner(attention.norm(x)) + mlp.inner(mlp.norm(x))
    torch.testing.assert_close(Block(attention, mlp, parallel=True)(x), expected)
    torch.testing.assert_close(Block(attention, mlp)(x), mlp(attention(x)))


def test_rotary_attention_depends_on_distances_alone():
    torch.manual_seed(0)
    rotary = RotaryEmbedding(8, fraction=0.5, heads_first=False)
    layer = CausalAttention(16, 2, rotary=rotary, qk_norm=True).double()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    here, there = (rotary(torch.arange(9) + shift, dtype=torch.float64) for shift in (0, 1000))
    torch.testing.assert_close(layer(x, here), layer(x, there))
    far_apart = rotary(torch.arange(9) * 3, dtype=torch.float64)
    assert (layer(x, here) - layer(x, far_apart)).abs().max() > 1e-4
