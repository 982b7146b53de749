"""One call per way of using a kernel; test_kernels_compile.py compiles every kernel that they start.

A new op adds its calls to CALLS, a line each. They run on the pretend GPU: forward, then backward.
"""

import torch
from torch.optim import AdamW

from oomph.fixes.optimizers.low_bit import LowBitAdam
from oomph.ops import (
    BlockPattern,
    MLPWeights,
    attention,
    linear_cross_entropy,
    locality_bias,
    rotary,
    tiled_mlp,
)
from oomph.ops.delta_attention import kda
from oomph.ops.short_convolution import short_convolution
from oomph.ops.sparse_attention import nsa
from oomph.ops.spiking import lif_gate
from oomph.ops.state_space import selective_scan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def classes(count, tokens=4096):
    return torch.randint(count, (tokens,), device="cuda")


def every_option_of_cross_entropy():
    loss, lse = linear_cross_entropy(
        randn(4096, 512, dtype=FP16),
        randn(50257, 512, dtype=FP16),
        classes(50257),
        bias=randn(50257, dtype=FP16),
        shift=True,
        label_smoothing=0.1,
        z_loss=1e-4,
        softcap=30.0,
        class_weight=torch.rand(50257, device="cuda"),
        token_weight=torch.rand(4096, device="cuda"),
        return_lse=True,
        impl="triton",
    )
    return loss + lse.sum()


def mlp(activation, gated, dtype=BF16):
    gate = randn(512, 256, dtype=dtype) if gated else None
    weights = MLPWeights(
        randn(512, 256, dtype=dtype), randn(256, 512, dtype=dtype), gate, activation=activation
    )
    return tiled_mlp(weights, randn(1000, 256, dtype=dtype), impl="triton")


def heads(size, dtype=BF16, tokens=1024):
    q = randn(2, 4, tokens, size, dtype=dtype)
    return q, randn(2, 2, tokens, size, dtype=dtype), randn(2, 2, tokens, size, dtype=dtype)


def attention_with_every_option():
    points = torch.rand(1024, 3, device="cuda")
    options = {"bias": locality_bias(points, points, 2.0), "pattern": BlockPattern("mixed", block=64)}
    mask = torch.ones(2, 1024, device="cuda", dtype=torch.bool)
    return attention(*heads(128), key_mask=mask, causal=True, impl="triton", **options)


def in_several_blocks():
    return linear_cross_entropy(
        randn(4096, 512), randn(50257, 512), classes(50257), memory_budget="64MiB", impl="triton"
    )


def rand(*shape, dtype=BF16):
    return torch.rand(*shape, device="cuda", dtype=dtype, requires_grad=True)


def delta_attention():
    q, k, v = (randn(2, 512, 4, 128) for _ in range(3))
    q, k = (
        torch.nn.functional.normalize(x, dim=-1) for x in (q, k)
    )  # the states grow without bound otherwise
    decay = -torch.rand(2, 512, 4, 128, device="cuda")
    return kda(q, k, v, decay, rand(2, 512, 4), impl="triton")[0]


def scan():
    x, z, delta = randn(2, 512, 256), randn(2, 512, 256), randn(2, 2, 512, 256)
    b, c = randn(2, 2, 512, 16), randn(2, 2, 512, 16)
    a, d = -rand(2, 256, 16, dtype=FP32), randn(2, 256, dtype=FP32)
    return selective_scan(x, delta, a, b, c, d, z=z, delta_softplus=True, direction="both", impl="triton")


def sparse():
    q, k, v = randn(2, 1024, 16, 64), randn(2, 1024, 1, 64), randn(2, 1024, 1, 64)
    gates = (rand(2, 1024, 16) for _ in range(3))
    return nsa(q, k, v, *gates, compress=lambda blocks: blocks.mean(2), impl="triton")


def spikes():
    return lif_gate(randn(2, 128, 4, 64), decay=0.9, threshold=1.0, surrogate_beta=4.0, impl="triton")[0]


def optimizer_step(optimizer, dtype, state, **options):
    weight = torch.nn.Parameter(randn(256, 256, dtype=dtype).detach())
    weight.grad = randn(256, 256, dtype=dtype).detach()
    made = optimizer([weight], lr=1e-2, **options)
    LowBitAdam(made, state, stochastic=dtype is BF16, fix="stochastic_rounding").step()
    return randn(1).sum()


CALLS = {
    "cross entropy": lambda: linear_cross_entropy(
        randn(4096, 512), randn(50257, 512), classes(50257), impl="triton"
    ),
    "cross entropy in several blocks": in_several_blocks,
    "cross entropy with every option": every_option_of_cross_entropy,
    "gated silu MLP": lambda: mlp("silu", gated=True),
    "gelu MLP": lambda: mlp("gelu", gated=False, dtype=FP16),
    "gated gelu_tanh MLP in float32": lambda: mlp("gelu_tanh", gated=True, dtype=FP32),
    "relu MLP": lambda: mlp("relu", gated=False),
    "rotary": lambda: rotary(randn(2, 4, 1000, 128), impl="triton"),
    "rotary of a part": lambda: rotary(
        randn(2, 7, 33, 80, dtype=FP32), fraction=0.4, heads_first=False, impl="triton"
    ),
    "attention with every option": attention_with_every_option,
    "delta attention": delta_attention,
    "selective scan in both directions": scan,
    "short convolution": lambda: short_convolution(randn(2, 515, 256), randn(256, 1, 4), impl="triton"),
    "sparse attention": sparse,
    "spiking gate": spikes,
    "AdamW with 8-bit state": lambda: optimizer_step(AdamW, FP32, "8bit"),
    "AdamW with 8-bit state and stochastic rounding": lambda: optimizer_step(AdamW, BF16, "8bit"),
    "AdamW in bfloat16": lambda: optimizer_step(AdamW, BF16, "bfloat16", maximize=True),
}
