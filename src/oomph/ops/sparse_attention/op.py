"""The public function: checks the call, chooses an implementation, compresses, runs it."""

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import (
    ASKED_FOR,
    Choice,
    explained_by,
    log_choice,
    matmul_dtype,
    no_autocast,
    no_compile,
)
from oomph.ops.sparse_attention.chunked import ChunkedSparseAttention, tokens_per_chunk
from oomph.ops.sparse_attention.compression import compressed_pair, maps_of
from oomph.ops.sparse_attention.function import SparseAttention, why_not_kernels
from oomph.ops.sparse_attention.problem import (
    IMPLS,
    Compress,
    Sizes,
    check_tensors,
    in_one_dtype,
    make_sizes,
)
from oomph.ops.sparse_attention.reference import reference


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_cmp: Tensor,
    gate_slc: Tensor,
    gate_win: Tensor,
    compress: Compress,
    block_size: int,
    compress_block: int,
    compress_stride: int,
    top_n: int,
    window: int,
    scale: float | None,
    impl: str,
) -> Choice:
    common.check_one_of("impl", impl, IMPLS)
    check_tensors(q, k, v, gate_cmp, gate_slc, gate_win)
    maps_of(compress)
    sizes = make_sizes(q.shape[3], block_size, compress_block, compress_stride, top_n, window, scale)
    return _decide(q, k, sizes, impl)


@explained_by(_choose)
def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_cmp: Tensor,
    gate_slc: Tensor,
    gate_win: Tensor,
    *,
    compress: Compress,
    block_size: int = 64,
    compress_block: int = 32,
    compress_stride: int = 16,
    top_n: int = 16,
    window: int = 512,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Native sparse attention (causal): the gated sum of attention to compressed, selected and nearby keys.

    q [B, T, HQ, D], k and v [B, T, H, D] of one dtype, HQ a multiple of H (query heads h*HQ/H and on share
    key/value head h, and select the same blocks); gates [B, T, HQ], as they are (after a sigmoid, say), of
    any float dtype. The result is [B, T, HQ, D]. Scores and sums are fp32 (float64 for float64).

    compress: "mean"; or a function of blocks [B, N, compress_block, H, D] (overlapping, a view) that returns
        [B, N, H, D], such as a module with parameters, called for keys and for values; or a pair of those,
        one for keys and one for values. N = (T - compress_block) // compress_stride + 1, or 0.
        Token t sees the compressed blocks whose last token is not after t; where there are none, zeros.
    top_n: selected blocks of block_size tokens: the first, the token's own, the one before, and those with
        the largest weights in the compressed attention (see reference.py for the exact rule). Fewer where
        there are fewer. No gradient flows through the choice.
    window: the nearest tokens, t itself included; more than T is as good as T.
    scale: default 1/sqrt(D).
    impl: "auto", "triton" (our kernels: D to 256, HQ/H to 64), "chunked" (plain torch), "reference" (T x T).

    Gradients for all tensors and for what `compress` reads. Memory is linear in T; see function.py for what
    is saved. First derivatives only. `oomph.ops.explain(nsa, ...)` tells what would run and why.
    """
    common.check_one_of("impl", impl, IMPLS)
    check_tensors(q, k, v, gate_cmp, gate_slc, gate_win)
    maps_of(compress)
    sizes = make_sizes(q.shape[3], block_size, compress_block, compress_stride, top_n, window, scale)
    choice = log_choice("nsa", _decide(q, k, sizes, impl))
    q, k, v = in_one_dtype(q, k, v)
    ck, cv = compressed_pair(k, v, compress, sizes)
    gates = (gate_cmp, gate_slc, gate_win)
    if q.numel() == 0:
        return _nothing(q, k, v, gates)
    with no_autocast(q):
        if choice.impl == "reference":
            return reference(q, k, v, gates, ck, cv, sizes)
        return _run(choice.impl, q, k, v, ck, cv, gates, sizes)


@no_compile
def _run(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ck: Tensor,
    cv: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    sizes: Sizes,
) -> Tensor:
    tensors = (q, k, v, ck, cv, *gates)
    out: Tensor
    if impl == "triton":
        # Asked here, because within an autograd function gradients are always off.
        out = SparseAttention.apply(*tensors, sizes, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    else:
        out = ChunkedSparseAttention.apply(*tensors, sizes)  # type: ignore[no-untyped-call]
    return out


@no_compile
def _decide(q: Tensor, k: Tensor, sizes: Sizes, impl: str) -> Choice:
    objection = why_not_kernels(q, k, matmul_dtype(q), sizes)
    if impl == "triton":
        if objection is not None:
            raise ArgumentError(
                f"impl='triton' cannot run this call ({objection}); choose 'auto' or 'chunked'"
            )
        return Choice("triton", ASKED_FOR)
    if impl == "reference":
        return Choice("reference", ASKED_FOR)
    if impl == "chunked":
        return _chunked(q, sizes, ASKED_FOR)
    if q.device.type == "cuda" and objection is None:
        return Choice("triton", "our kernels")
    return _chunked(q, sizes, f"no kernel of ours ({objection or 'the interpreter is for tests'})")


def _chunked(q: Tensor, sizes: Sizes, reason: str) -> Choice:
    return Choice("chunked", reason, {"tokens": tokens_per_chunk(q, sizes)})


def _nothing(q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, ...]) -> Tensor:
    """The empty result, on which every input hangs."""
    out = q * gates[0][..., None]
    for other in (k, v, *(gate[..., None] for gate in gates)):
        out = out + other.sum().to(q.dtype)
    return out.to(q.dtype)
