"""A few mistakes in calls of every op and module: one line that names what was given and what is valid.

test_fuzz.py replaces random arguments by invalid ones.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from oomph.errors import ArgumentError
from oomph.nn import (
    BidirectionalMamba,
    KimiDeltaAttention,
    NativeSparseAttention,
    RotaryEmbedding,
    SpikingKDABlock,
)
from oomph.nn.loss import LinearCrossEntropyLoss
from oomph.nn.modulated import ModulatedLinear
from oomph.ops import (
    BlockPattern,
    MLPWeights,
    attention,
    common,
    compute_loss_chunked,
    explain,
    kda,
    lif_gate,
    linear_cross_entropy,
    locality_bias,
    modulated_linear,
    nsa,
    rotary,
    rotary_table,
    selective_scan,
    tiled_mlp,
)
from oomph.ops.modulation import Int8Weight, compute_weight_delta, quantize_int8
from oomph.ops.short_convolution import short_convolution

X, INT8 = torch.zeros, torch.zeros(2, 3, dtype=torch.int8)


def loss(**changes):
    given = {"x": X(2, 5, 3), "weight": X(7, 3), "target": X(2, 5).long(), **changes}
    with pytest.raises(ArgumentError):
        explain(linear_cross_entropy, **given)
    return linear_cross_entropy(**given)


def delta_attention(**changes):
    given = {name: X(2, 6, 2, 5) for name in ("q", "k", "log_alpha")} | {"v": X(2, 6, 2, 7)}
    return kda(**given | {"beta": X(2, 6, 2)} | changes)


def continued(x):
    layer = KimiDeltaAttention(12, 2, 4)
    return layer(x, layer(X(2, 5, 12))[1])


def packed(ends):
    return kda(X(1, 6, 2, 5), X(1, 6, 2, 5), X(1, 6, 2, 7), X(1, 6, 2, 5), X(1, 6, 2), cu_seqlens=ends)


def modulated(**changes):
    given = {"h": X(2, 5, 7), "weight": X(7, 11), "A": X(7, 3), "B": X(3, 11), "mod": X(2, 5, 3)}
    return modulated_linear(**given | changes)


def scan(**changes):
    given = {"x": X(2, 37, 5), "delta": X(2, 37, 5), "A": X(5, 3), "B": X(2, 37, 3), "C": X(2, 37, 3)}
    return selective_scan(**given | changes)


def sparse(**changes):
    given = {"q": X(1, 20, 4, 8), "k": X(1, 20, 2, 8), "v": X(1, 20, 2, 8), "compress": "mean"}
    return nsa(**given | {gate: X(1, 20, 4) for gate in ("gate_cmp", "gate_slc", "gate_win")} | changes)


def attend(**changes):
    return attention(**{name: X(2, 2, 12, 16) for name in "qkv"} | changes)


def spikes(**changes):
    given = {"drive": X(2, 3, 4), "decay": 0.5, "threshold": 1.0, "surrogate_beta": 4.0}
    return lif_gate(**given | changes)


def mlp(**changes):
    return MLPWeights(**{"up": X(20, 12), "down": X(9, 20), "gate": X(20, 12)} | changes)


ROWS = [
    (lambda: loss(reduction="average"), "reduction='average' is not valid; choose from 'mean', 'sum'"),
    (lambda: loss(target=X(2, 5)), "target must be a tensor of class numbers .*float32"),
    (lambda: loss(x=X(2, 5, 4)), r"x must be \[..., 3\] to match weight \[7, 3\]; given: \[2, 5, 4\]"),
    (lambda: loss(target=X(2, 4).long(), shift=True), "oomph shifts, not the caller"),
    (lambda: loss(class_weight=torch.ones(7, requires_grad=True)), "class_weight requires a gradient"),
    (lambda: loss(x=X(2, 5, 3).bfloat16()), "one dtype"),
    (lambda: loss(label_smoothing=math.nan), "give a number from 0 to 1"),
    (lambda: loss(accumulate_into_grad=True, weight=nn.Parameter(X(7, 3)) * 2), "a weight that owns its"),
    (lambda: compute_loss_chunked(X(3, 4, 6), X(3, 4).long(), nn.ReLU()), "linear layer .* given: ReLU"),
    (lambda: LinearCrossEntropyLoss(6, 13, smoothing=0.1), "did you mean 'label_smoothing'"),
    (lambda: LinearCrossEntropyLoss(6, 13, token_weight=3), "token_weight is given per call"),
    (
        lambda: delta_attention(k=X(2, 6, 2, 4)),
        r"k has shape \[2, 6, 2, 4\]; valid: \[2, 6, 2, 5\], that of q",
    ),
    (lambda: delta_attention(mode="sequential", memory_chunk_size=64), "leave it out of 'sequential'"),
    (lambda: delta_attention(memory_budget="1MiB", memory_chunk_size=64), "both given"),
    (lambda: delta_attention(log_alpha=X(2, 6, 2, 5) + 0.25), "log_alpha has a value of 0.25; valid: <= 0"),
    (lambda: delta_attention(beta=X(2, 6, 2) - 0.5), "beta has values from -0.5 to -0.5; valid: 0 to 1"),
    (lambda: delta_attention(cu_seqlens=[0, 6]), "a batch of 2; valid: .*B = 1"),
    (lambda: packed([0, 5, 3, 6]), r"cu_seqlens=\[0, 5, 3, 6\] is not valid; valid: rising from 0 to T = 6"),
    (lambda: packed([0.0, 6.0]), "integers"),
    (lambda: KimiDeltaAttention(12, 0, 4), "num_heads=0 is not valid; give a whole number >= 1"),
    (lambda: KimiDeltaAttention(12, 2, 4)(X(2, 12)), r"x has shape \[2, 12\]; valid: \[B, T, 12\]"),
    (lambda: continued(X(1, 5, 12)), r"state has shape \[2, 3, 8\]; valid: \[1, 3, 8\] \(batch, "),
    (lambda: SpikingKDABlock(10, 3, 4, token_drop=1.0), r"token_drop=1.0 is not valid; .* in \[0, 1\)"),
    (lambda: SpikingKDABlock(10, 3, 4)(X(1, 3, 10), dropped=X(1, 3)), r"dropped is .*; valid: bool \[1, 3\]"),
    (lambda: spikes(decay=1.01), r"decay=1.01 is not valid; .*\[0, 1\]"),
    (lambda: spikes(threshold=0), "threshold=0 is not valid; give a number > 0"),
    (lambda: tiled_mlp(mlp(), X(3, 11)), r"x has 11 features; up \(20, 12\) takes 12"),
    (lambda: tiled_mlp(mlp(), X(3, 12), tile=0), "tile=0 is not valid"),
    (lambda: tiled_mlp(mlp(), X(3, 12), memory_budget=100), "too small; one token's buffers take 240 B"),
    (lambda: tiled_mlp("relu", X(3, 12)), "fn_or_module is a str"),
    (lambda: tiled_mlp(lambda x: x.sum(0), X(6, 12), tile=4), r"made \(12,\) of .*valid: one row per token"),
    (lambda: tiled_mlp(torch.tanh, X(3, 12), impl="triton"), "impl='triton' is for known MLPs"),
    (lambda: tiled_mlp(nn.BatchNorm1d(12), X(3, 12)), "batch norm in training mode"),
    (lambda: mlp(activation="swish"), "activation='swish' is not valid; choose from 'silu'"),
    (lambda: mlp(down=X(9, 21)), r"down has shape \[9, 21\]; valid: \[9, 20\], to match up"),
    (lambda: modulated(weight=X(11, 7)), r"an nn.Linear's weight is \[f, d\]: give linear.weight.t\(\)"),
    (lambda: modulated(mod=X(2, 4, 3)), r"mod \[2, 4, 3\] does not broadcast to the tokens of h \[2, 5, 7\]"),
    (lambda: modulated(weight=X(7, 11, dtype=torch.int8)), "torch.int8; valid: .* an Int8Weight"),
    (lambda: modulated(weight=X(7, 11, device="meta")), "one device; given: h on cpu"),
    (lambda: ModulatedLinear.from_linear(nn.ReLU(), 3), "ReLU"),
    (lambda: Int8Weight(INT8, torch.ones(2)), r"scale is torch.float32 \[2\]; valid: float \[3\]"),
    (lambda: quantize_int8(torch.full((2, 2), math.nan)), "with NaN or infinity; valid: finite numbers"),
    (lambda: compute_weight_delta(X(7, 3), X(3, 11), X(2, 5, 3), 5), "token_idx 5 .*the tokens are 0 to 4"),
    (
        lambda: compute_weight_delta(X(7, 3), X(3, 11), X(2, 5, 3), (4,)),
        r"mod \[2, 5, 3\]; give 2 numbers in a",
    ),
    (lambda: rotary(X(1, 2, 3, 7)), "fraction=1.0 of head size 7 rotates 7 numbers"),
    (lambda: rotary(X(1, 2, 3, 8), positions=torch.arange(4)), r"positions has shape \[4\]; valid for B=1"),
    (lambda: rotary(X(1, 2, 3, 8), table=rotary_table(torch.arange(4), 8)), r"table.cos has shape \[4, 4\]"),
    (lambda: rotary(X(1, 2, 3, 8), X(1, 2, 4, 8)), r"q has \(B, T, D\) = \(1, 3, 8\) and k \(1, 4, 8\)"),
    (lambda: rotary(X(1, 2, 3, 8), turned_heads=3), "turned_heads=3"),
    (lambda: rotary_table(torch.arange(3), 7), "dim=7 is not valid; rotary rotates pairs"),
    (lambda: rotary_table(torch.arange(3).half(), 8), "positions has dtype torch.float16; valid: integers"),
    (lambda: RotaryEmbedding(8, theta="big"), "theta='big' is not valid"),
    (lambda: scan(delta=X(2, 36, 5)), r"delta has shape \[2, 36, 5\]; valid: \[2, 37, 5\], for x"),
    (lambda: scan(direction="both"), r"A has shape \[5, 3\]; valid for direction='both': \[2, d, n\]"),
    (lambda: scan(chunk_size=0), "chunk_size=0 is not valid; give a whole number >= 1"),
    (lambda: scan(A=X(5, 300), B=X(2, 37, 300), C=X(2, 37, 300), impl="triton"), "n=300 is above 64"),
    (lambda: BidirectionalMamba(8)(X(2, 7)), r"h has shape \[2, 7\]; valid: \[B, T, 8\]"),
    (lambda: sparse(block_size=18), "block_size=18 is not a multiple of compress_stride="),
    (lambda: sparse(top_n=2), "top_n=2 is not valid; give a whole number >= 3"),
    (lambda: sparse(compress="max"), "compress='max' is not valid"),
    (lambda: sparse(q=X(1, 20, 3, 8)), "query heads are not a multiple of key/value heads"),
    (lambda: sparse(gate_win=X(1, 20, 2)), r"gate_win has shape \[1, 20, 2\]; valid: \[1, 20, 4\]"),
    (lambda: NativeSparseAttention(12, 3, 2, 4), "num_heads=3 is not a multiple of num_kv_heads=2"),
    (lambda: NativeSparseAttention(12, 2, 2, 4, rotary=RotaryEmbedding(4)), "heads_first=True; valid"),
    (lambda: short_convolution(X(4, 5), X(5, 1, 3)), r"x \[4, 5\] and weight \[5, 1, 3\] do not fit"),
    (lambda: short_convolution(X(2, 4, 5), X(5, 1, 3), unit_size=2), "a divisor of the 5 channels"),
    (lambda: attend(q=X(2, 2, 12)), "takes 4-dimensional tensors"),
    (lambda: attend(q=X(2, 3, 12, 16)), "not a multiple of key/value heads"),
    (lambda: attend(bias=X(5, 12)), r"bias has shape \[5, 12\], which does not broadcast"),
    (lambda: attend(bias=lambda b, h, i, j: nn.Parameter(X(12))[j]), "does not list it"),
    (lambda: attend(key_mask=X(2, 11).bool()), r"key_mask is .*\[2, 11\]; valid: torch.bool \[2, 12\]"),
    (lambda: attend(impl="flex"), "impl='flex' is not valid; choose from 'auto', 'sdpa', .*'chunked'"),
    (lambda: attend(impl="sdpa", pattern=BlockPattern("local")), "impl='sdpa' cannot run .*a block pattern"),
    (lambda: BlockPattern(kind="diagonal"), "kind='diagonal' is not valid"),
    (lambda: locality_bias(torch.rand(5, 2), torch.rand(5, 3)), "points of one dimension"),
    (lambda: common.check_floating(x=X(2).long()), "x has dtype torch.int64; valid: float16, bfloat16"),
    (lambda: common.check_one_of("impl", "fast", ("auto",)), "impl='fast' is not valid; choose from 'auto'"),
    (lambda: attend(causal="no"), "causal='no' is not valid; choose from False, True"),
    (lambda: attend(causal=np.array([True, False])), r"causal=array.* is not valid; choose from False, True"),
    (lambda: common.parse_memory_budget("64"), "memory_budget='64'"),
]


@pytest.mark.parametrize(("call", "message"), ROWS, ids=[message for _, message in ROWS])
def test_a_mistake_is_one_line(call, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
