"""The cases of attention: B x H heads x N positions x D features; bias function, GQA, block patterns."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ops.peers import ops
from benchmarks.ops.runs import Case, Contender, Inputs

TABLE = (64, 8, 8, 1024, 64)  # B, query heads, key heads, N, D: report 004
GQA = (1, 32, 8, 8192, 128)
BLOCKS = (4, 8, 8, 4096, 64)  # report 001's patterns, blocks of 64
Shape = tuple[int, int, int, int, int]
TINY, TINY_GQA, TINY_BLOCKS = (2, 2, 2, 64, 16), (1, 4, 2, 96, 16), (1, 2, 2, 512, 16)
BLOCK = 64
EFFICIENT = "SDPA efficient fp32"
STRENGTH = 10.0  # of report 004's bias: -10 |t - s|^2


def inputs(shape: Shape, dtypes: tuple[torch.dtype, ...], device: torch.device) -> Inputs:
    """q, k, v and the result's gradient in each dtype ("q32", "q16", ...), and the positions of a grid."""
    b, heads, key_heads, n, d = shape
    made: Inputs = {"t": grid(n, device), "s": grid(n, device)}
    for dtype in dtypes:
        bits = _bits(dtype)
        for name, count in (("q", heads), ("k", key_heads), ("v", key_heads), ("g", heads)):
            value = torch.randn(b, count, n, d, device=device, dtype=dtype)
            made[f"{name}{bits}"] = value.requires_grad_(name != "g")
    return made


def grid(n: int, device: torch.device) -> Tensor:
    """n positions in the unit square, row by row."""
    side = int(n**0.5)
    index = torch.arange(n, device=device)
    return torch.stack([index // side, index % side], -1).float() / side


def _bits(dtype: torch.dtype) -> int:
    return 8 * dtype.itemsize


def eager(i: Inputs, bits: int, locality: bool = False) -> Tensor:
    q, k, v = (i[f"{name}{bits}"] for name in "qkv")
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if locality:
        scores = scores - STRENGTH * torch.cdist(i["t"], i["s"]).square().to(scores.dtype)
    return scores.softmax(-1) @ v


def fused(i: Inputs, bits: int, backend: SDPBackend, **options: Any) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(i[f"q{bits}"], i[f"k{bits}"], i[f"v{bits}"], **options)


def _own(name: str) -> Any:
    return getattr(importlib.import_module("oomph.ops.softmax_attention"), name)


def ours(i: Inputs, bits: int, locality: bool = False, **options: Any) -> Tensor:
    if locality:
        options["bias"] = _own("locality_bias")(i["t"], i["s"], STRENGTH)
    return ops().attention(i[f"q{bits}"], i[f"k{bits}"], i[f"v{bits}"], **options)


@functools.cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(i: Inputs, locality: bool = False) -> Tensor:
    t, s = i["t"], i["s"]

    def near(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        x, y = t[q, 0] - s[k, 0], t[q, 1] - s[k, 1]
        return score - STRENGTH * (x * x + y * y)

    return _flex()(i["q16"], i["k16"], i["v16"], score_mod=near if locality else None)


def patterned(i: Inputs, kind: str, **options: Any) -> Tensor:
    return ours(i, 16, causal=True, pattern=_own(kind)(**options))


def mask_of(kind: str, window: int = 1, stride: int = 2) -> Callable[..., Tensor]:
    """The same pairs as our patterns, cut causally, written as FlexAttention's mask functions are."""

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = q // BLOCK, k // BLOCK
        near = query - key <= window if kind in ("local", "mixed") else query == key
        far = key % stride == 0 if kind in ("global_", "mixed") else query == key
        return (near | far) & (k <= q)

    return seen


def masked(i: Inputs, kind: str, **options: Any) -> Tensor:
    """SDPA with the pattern as a matrix of booleans, made in the warm-up."""
    n = i["q16"].shape[2]
    if "mask" not in i:
        index = torch.arange(n, device=i["q16"].device)
        i["mask"] = mask_of(kind, **options)(index, index, index[:, None], index)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(i["q16"], i["k16"], i["v16"], attn_mask=i["mask"])


def flex_blocks(i: Inputs, kind: str, **options: Any) -> Tensor:
    """FlexAttention with the pattern as a block mask, made in the warm-up."""
    from torch.nn.attention.flex_attention import create_block_mask

    if "block_mask" not in i:
        n, seen = i["q16"].shape[2], mask_of(kind, **options)
        i["block_mask"] = create_block_mask(seen, None, None, n, n, device=i["q16"].device)
    return _flex()(i["q16"], i["k16"], i["v16"], block_mask=i["block_mask"])


def floor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The result and the three gradients."""
    b, heads, key_heads, n, d = shape
    return b * (2 * heads + 2 * key_heads) * n * d * dtype.itemsize


def table_case(shape: Shape) -> Case:
    single = floor_bytes(shape, torch.float32)
    return Case(
        op="attention",
        shape=f"{_named(shape)}",
        make=partial(inputs, shape, (torch.float32, torch.bfloat16)),
        contenders=(
            Contender("eager fp32", partial(eager, bits=32), "g32", against=EFFICIENT, floor=single),
            Contender(
                "eager fp32 locality",
                partial(eager, bits=32, locality=True),
                "g32",
                against=EFFICIENT,
                floor=single,
            ),
            Contender(
                EFFICIENT, _sdpa(32, SDPBackend.EFFICIENT_ATTENTION), "g32", against=EFFICIENT, floor=single
            ),
            Contender("oomph fp32", partial(ours, bits=32), "g32", against=EFFICIENT, floor=single),
            Contender(
                "oomph fp32 locality",
                partial(ours, bits=32, locality=True),
                "g32",
                against=EFFICIENT,
                floor=single,
            ),
            Contender("SDPA flash bf16", _sdpa(16, SDPBackend.FLASH_ATTENTION), "g16"),
            Contender("SDPA cuDNN bf16", _sdpa(16, SDPBackend.CUDNN_ATTENTION), "g16"),
            Contender("oomph bf16", partial(ours, bits=16), "g16"),
            Contender("flex raw bf16", flex, "g16"),
            Contender("flex raw bf16 locality", partial(flex, locality=True), "g16"),
            Contender("oomph bf16 locality", partial(ours, bits=16, locality=True), "g16"),
        ),
        floor=floor_bytes(shape, torch.bfloat16),
        limit="SDPA flash bf16",
    )


def gqa_case(shape: Shape) -> Case:
    options = {"is_causal": True, "enable_gqa": True}
    return Case(
        op="attention",
        shape=f"{_named(shape)} causal GQA",
        make=partial(inputs, shape, (torch.bfloat16,)),
        contenders=(
            Contender("SDPA flash bf16", _sdpa(16, SDPBackend.FLASH_ATTENTION, **options), "g16"),
            Contender("SDPA cuDNN bf16", _sdpa(16, SDPBackend.CUDNN_ATTENTION, **options), "g16"),
            Contender("oomph bf16", partial(ours, bits=16, causal=True), "g16"),
        ),
        floor=floor_bytes(shape, torch.bfloat16),
        limit="SDPA flash bf16",
    )


def blocks_case(shape: Shape, kind: str, **options: int) -> Case:
    told = " ".join(f"{name} {value}" for name, value in options.items())
    return Case(
        op="attention",
        shape=f"{_named(shape)} causal {kind.rstrip('_')} {told}",
        make=partial(inputs, shape, (torch.bfloat16,)),
        contenders=(
            Contender("flash bf16, all pairs", _sdpa(16, SDPBackend.FLASH_ATTENTION, is_causal=True), "g16"),
            Contender("efficient bf16, mask", partial(masked, kind=kind, **options), "g16"),
            Contender("flex raw bf16", partial(flex_blocks, kind=kind, **options), "g16"),
            Contender("oomph bf16", partial(patterned, kind=kind, **options), "g16"),
        ),
        floor=floor_bytes(shape, torch.bfloat16),
        limit="flash bf16, all pairs",
    )


def cases(tiny: bool) -> list[Case]:
    table, gqa, blocks = (TABLE, GQA, BLOCKS) if not tiny else (TINY, TINY_GQA, TINY_BLOCKS)
    return [
        table_case(table),
        gqa_case(gqa),
        blocks_case(blocks, "local", window=1),
        blocks_case(blocks, "mixed", window=1, stride=4),
    ]


def cpu_case(shape: Shape) -> Case:
    """Against eager, in float32, without and with the bias function."""
    return Case(
        op="attention",
        shape=_named(shape),
        make=partial(inputs, shape, (torch.float32,)),
        contenders=(
            Contender("eager", partial(eager, bits=32), "g32"),
            Contender("oomph chunked", partial(ours, bits=32, impl="chunked"), "g32"),
            Contender("eager locality", partial(eager, bits=32, locality=True), "g32"),
            Contender(
                "oomph chunked locality",
                partial(ours, bits=32, locality=True, impl="chunked"),
                "g32",
                against="eager locality",
            ),
        ),
        floor=floor_bytes(shape, torch.float32),
        limit="eager",
    )


def _sdpa(bits: int, backend: SDPBackend, **options: Any) -> Callable[[Inputs], Tensor]:
    return partial(fused, bits=bits, backend=backend, **options)


def _named(shape: Shape) -> str:
    b, heads, key_heads, n, d = shape
    return f"B{b} H{heads}{'' if heads == key_heads else f'/{key_heads}'} N{n} D{d}"
