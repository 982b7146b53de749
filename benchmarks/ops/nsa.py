"""The cases of nsa: B x T tokens, HQ query heads and H key heads of D features; three branches, bfloat16.

What it is compared with answers other questions: dense attention attends to everything (cuDNN's kernel,
causal, grouped heads), and fla's parallel_nsa has no window here, compresses blocks of 64 that do not overlap
by their mean, and runs from 16 query heads per key head on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ops.peers import Peer, fla_module, fla_of, op
from benchmarks.ops.rows import Row
from benchmarks.ops.runs import Case, Contender, Inputs, Machine, gradient_errors

Shape = tuple[int, int, int, int, int]  # B, T, HQ, H, D
WIDE: tuple[Shape, ...] = tuple((1, tokens, 64, 4, 128) for tokens in (4096, 8192, 16384, 32768, 65536))
NARROW: tuple[Shape, ...] = tuple(
    (1, tokens, 32, 8, 128) for tokens in (4096, 8192, 16384, 32768, 65536, 131072)
)
HELD_OUT: tuple[Shape, ...] = ((2, 12000, 16, 8, 64),)
LEARNED: tuple[Shape, ...] = ((1, 32768, 64, 4, 128), (1, 32768, 32, 8, 128))  # with a network to compress
ERRORS: tuple[Shape, ...] = ((1, 1024, 16, 4, 64), (1, 1000, 32, 2, 128))
TINY: tuple[Shape, ...] = ((1, 160, 16, 1, 16), (1, 160, 4, 2, 16))
FLA_TOKENS = (4096, 8192, 16384, 32768)  # it compiles and tunes anew for a length, for up to two minutes
SLOW = 65536  # tokens from which on dense attention takes some tenths of a second
DENSE = "SDPA cuDNN dense"
NAMES = ("q", "k", "v", "gate_cmp", "gate_slc", "gate_win")
GATES = NAMES[3:]


def named(shape: Shape) -> str:
    b, t, heads, key_heads, d = shape
    return f"B{b} T{t} HQ{heads} H{key_heads} D{d}"


def inputs(shape: Shape, learned: bool, dtype: torch.dtype, device: torch.device) -> Inputs:
    b, t, heads, key_heads, d = shape
    made: Inputs = {}
    for name, count in (("q", heads), ("k", key_heads), ("v", key_heads)):
        made[name] = torch.randn(b, t, count, d, device=device, dtype=dtype).requires_grad_()
    for name in GATES:
        made[name] = torch.rand(b, t, heads, device=device, dtype=dtype).requires_grad_()
    if learned:
        network = importlib.import_module("oomph.nn.sparse_attention").BlockCompression
        made["compress_k"] = network(d, 32, 16, device=device, dtype=dtype)
        made["compress_v"] = network(d, 32, 16, device=device, dtype=dtype)
    made["grad"] = torch.randn(b, t, heads, d, device=device, dtype=dtype)
    return made


def floor_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """The result and the gradients of queries, keys, values and gates."""
    b, t, heads, key_heads, d = shape
    return b * t * (2 * heads * d + 2 * key_heads * d + 3 * heads) * dtype.itemsize


def ours(i: Inputs, compress: Any = "mean", **options: Any) -> Tensor:
    return op("sparse_attention", "nsa")(*(i[name] for name in NAMES), compress=compress, **options)


def ours_learned(i: Inputs, **options: Any) -> Tensor:
    """With the network of nn.NativeSparseAttention, which takes the tokens rather than overlapping blocks."""
    keys, values = i["compress_k"], i["compress_v"]
    return ours(i, compress=(lambda _: keys(i["k"]), lambda _: values(i["v"])), **options)


def dense(i: Inputs, backend: SDPBackend = SDPBackend.CUDNN_ATTENTION) -> Tensor:
    """Causal attention to all tokens, without gates."""
    q, k, v = (i[name].transpose(1, 2) for name in "qkv")
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def fla(i: Inputs) -> Tensor:
    parallel_nsa = fla_module("fla.ops.nsa").parallel_nsa
    q, k, v, gate_cmp, gate_slc = (i[name] for name in NAMES[:5])
    return parallel_nsa(q, k, v, gate_cmp, gate_slc, None, block_counts=16, block_size=64)


def fla_runs(shape: Shape) -> bool:
    _, tokens, heads, key_heads, _ = shape
    group = heads // key_heads
    return tokens in FLA_TOKENS and group >= 16 and group & (group - 1) == 0


def _case(shape: Shape, contenders: Sequence[Contender], learned: bool = False) -> Case:
    return Case(
        op="nsa",
        shape=named(shape),
        make=partial(inputs, shape, learned, torch.bfloat16),
        contenders=contenders,
        floor=floor_bytes(shape, torch.bfloat16),
        limit=DENSE,
        rounds=5 if shape[1] >= SLOW else None,
    )


def cases(peers: Sequence[Peer], tiny: bool) -> list[Case]:
    peer = fla_of(peers)
    found = []
    for shape in TINY if tiny else (*WIDE, *NARROW, *HELD_OUT):
        contenders = [Contender(DENSE, dense, "grad"), Contender("oomph", ours, "grad")]
        learned = tiny or shape in LEARNED
        if learned:
            contenders.append(Contender("oomph learned", ours_learned, "grad"))
        if peer and fla_runs(shape):
            contenders.insert(1, Contender("fla, no window", fla, "grad", peer=peer, exact=False))
        found.append(_case(shape, contenders, learned))
    return found


def error_rows(machine: Machine, peers: Sequence[Peer], tiny: bool) -> Iterator[list[Row]]:
    """Each gradient against the specification in float64.

    The tokens are so few that all their blocks are selected: a rounding cannot change the choice.
    """
    contenders = (
        Contender("eager", partial(ours, impl="reference"), "grad"),
        Contender("oomph", ours, "grad"),
        Contender("oomph chunked", partial(ours, impl="chunked"), "grad"),
    )
    for shape in TINY if tiny else ERRORS:
        case = _case(shape, contenders)
        yield gradient_errors(case, machine, NAMES, partial(ours, impl="reference"), "grad")
