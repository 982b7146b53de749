"""NativeSparseAttention against its formulas token by token; rotary, gradients."""

import math

import pytest
import torch

from oomph.nn.rotary import RotaryEmbedding
from oomph.nn.sparse_attention import BlockCompression, NativeSparseAttention

HIDDEN, HEADS, KV, D = 12, 4, 2, 4
SIZES = {"block_size": 4, "compress_block": 4, "compress_stride": 2, "top_n": 3, "window": 3}


def layer(**options):
    torch.manual_seed(0)
    made = NativeSparseAttention(HIDDEN, HEADS, KV, D, **{**SIZES, "dtype": torch.float64, **options})
    for name, each in made.named_parameters():
        if "norm" in name or "position" in name:
            torch.nn.init.normal_(each)
    return made


def tokens(*shape, seed=1):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax_sum(q, keys, values):
    if not keys:
        return torch.zeros_like(q), []
    weights = torch.softmax(torch.stack([q @ each for each in keys]) / math.sqrt(D), 0)
    return sum(w * v for w, v in zip(weights, values, strict=True)), weights.tolist()


def by_formula(made, x_TC, turn=None):
    """One sequence, token by token and head by head, from the parameters alone."""
    p = dict(made.named_parameters())
    T, group = len(x_TC), HEADS // KV
    frequencies = [10000.0 ** (-2 * i / D) for i in range(D // 2)]

    def prepared(name, t, head):
        z = (p[f"{name}_proj.weight"] @ x_TC[t])[head * D : (head + 1) * D]
        if f"{name}_norm.weight" in p:
            z = z / torch.sqrt(z.square().mean() + 1e-6) * p[f"{name}_norm.weight"]
        if turn is None or name == "v":
            return z
        turned = list(z)
        for i, f in enumerate(frequencies):
            c, s = math.cos(t * f), math.sin(t * f)
            a, b = z[i], z[i + D // 2]
            turned[i], turned[i + D // 2] = a * c - b * s, a * s + b * c
        return torch.stack(turned)

    def compressed(which, rows):
        out = []
        for start in range(0, T - 3, 2):
            block = torch.stack(rows[start : start + 4]) + p[f"compress_{which}.position"]
            z = p[f"compress_{which}.first.weight"] @ block.flatten() + p[f"compress_{which}.first.bias"]
            hidden = z * torch.sigmoid(z)
            out.append(p[f"compress_{which}.second.weight"] @ hidden + p[f"compress_{which}.second.bias"])
        return out

    gates = [torch.sigmoid(p["gate_proj.weight"] @ x + p["gate_proj.bias"]) for x in x_TC]
    rows = [[] for _ in range(T)]
    for kv in range(KV):
        ks = [prepared("k", t, kv) for t in range(T)]
        vs = [prepared("v", t, kv) for t in range(T)]
        cks, cvs = compressed("keys", ks), compressed("values", vs)
        for t in range(T):
            seen = [j for j in range(len(cks)) if 2 * j + 3 <= t]
            importance = [0.0] * (t // 4 + 1)
            far = []
            for g in range(group):
                q = prepared("q", t, kv * group + g)
                o, weights = softmax_sum(q, [cks[j] for j in seen], [cvs[j] for j in seen])
                far.append((q, o))
                for j, weight in zip(seen, weights, strict=True):
                    for stride in (j, j + 1):  # the strides of compressed block j; two of them in a block
                        if stride // 2 < len(importance):
                            importance[stride // 2] += weight
            always = {0, t // 4, t // 4 - 1} & set(range(len(importance)))
            others = sorted(set(range(len(importance))) - always, key=lambda b: (-importance[b], b))
            chosen = [*always, *others][: max(3, len(always))]
            places = [s for b in sorted(chosen) for s in range(4 * b, min(4 * b + 4, t + 1))]
            near = list(range(max(0, t - 2), t + 1))
            for g, (q, compressed_o) in enumerate(far):
                head = kv * group + g
                selected, _ = softmax_sum(q, [ks[s] for s in places], [vs[s] for s in places])
                nearby, _ = softmax_sum(q, [ks[s] for s in near], [vs[s] for s in near])
                a, b, c = (gates[t][branch * HEADS + head] for branch in range(3))
                rows[t].append(a * compressed_o + b * selected + c * nearby)
    return torch.stack([p["o_proj.weight"] @ torch.cat(row) for row in rows])


@pytest.mark.parametrize("turned", [False, True])
def test_values_and_gradients_are_those_of_the_formula(turned):
    rope = RotaryEmbedding(D, heads_first=False) if turned else None
    made, x = layer(rotary=rope, qk_norm=turned), tokens(1, 18).requires_grad_()
    table = None if rope is None else rope(torch.arange(18), dtype=torch.float64)
    y = made(x, table)
    right = by_formula(made, x[0], rope)[None]
    torch.testing.assert_close(y, right, rtol=1e-9, atol=1e-11)
    parameters, pull = [x, *made.parameters()], tokens(1, 18, seed=2)
    found = torch.autograd.grad(y, parameters, pull)
    for each, wanted in zip(found, torch.autograd.grad(right, parameters, pull), strict=True):
        assert each.any()
        torch.testing.assert_close(each, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("block", "stride"), [(4, 4), (6, 2), (8, 4)])
@pytest.mark.parametrize("length", [3, 8, 19])
def test_compressing_strides_equals_compressing_whole_blocks(block, stride, length):
    made = BlockCompression(D, block, stride, dtype=torch.float64)
    torch.nn.init.normal_(made.position)
    x = torch.randn(2, length, 3, D, dtype=torch.float64)
    found = made(x)
    starts = range(0, length - block + 1, stride)
    assert found.shape == (2, len(starts), 3, D)
    for n, start in enumerate(starts):
        blocks = x[:, start : start + block].transpose(1, 2) + made.position
        torch.testing.assert_close(
            found[:, n], made.second(torch.nn.functional.silu(made.first(blocks.flatten(2))))
        )


@pytest.mark.parametrize("length", [1, 3, 5])
def test_sequences_shorter_than_a_block(length):
    made = layer()
    y = made(tokens(2, length))
    y.sum().backward()
    torch.testing.assert_close(y[0], by_formula(made, tokens(2, length)[0]), rtol=1e-9, atol=1e-11)


def test_the_rotary_is_no_child():
    made = layer(rotary=RotaryEmbedding(D, heads_first=False))
    assert not any(isinstance(each, RotaryEmbedding) for each in made.modules())
