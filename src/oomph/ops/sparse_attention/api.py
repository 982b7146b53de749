"""The public function: checks the arguments, chooses an implementation, compresses, runs it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oomph.ops import common
from oomph.ops.sparse_attention.arguments import (
    IMPLS,
    Compress,
    NSAConfig,
    check_compress,
    check_tensors,
    compress_keys_and_values,
)
from oomph.ops.sparse_attention.autograd import SparseAttention, why_not_kernels
from oomph.ops.sparse_attention.chunked import ChunkedSparseAttention, tokens_per_chunk
from oomph.ops.sparse_attention.reference import reference


def _check_and_choose(
    q: Tensor, k: Tensor, *, impl: str, compress: Compress, **given: Any
) -> tuple[NSAConfig, common.Choice]:
    common.check_one_of("impl", impl, IMPLS)
    tensors = [given.pop(name) for name in ("v", "gate_cmp", "gate_slc", "gate_win")]
    check_tensors(q, k, *tensors)
    check_compress(compress)
    config = NSAConfig.create(q.shape[3], **given)
    return config, _choose(q, k, config, impl)


@common.explained_by(lambda **arguments: _check_and_choose(**arguments)[1])
@common.opaque_op
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
    """Native sparse attention (causal): the gated sum of compressed, selected and sliding-window attention.

    q [B, T, HQ, D], k and v [B, T, H, D] of one dtype, HQ a multiple of H (query heads h*HQ/H and on share
    key/value head h, and select the same blocks); gates [B, T, HQ], applied as they are (after a sigmoid,
    say), of any float dtype. The result is [B, T, HQ, D]. Scores and sums are fp32 (float64 for float64).

    compress: "mean"; or a function of blocks [B, N, compress_block, H, D] (overlapping, a view) that returns
        [B, N, H, D], such as a module with parameters, called for keys and for values; or a pair of those,
        one for keys and one for values. N = (T - compress_block) // compress_stride + 1, or 0.
        Token t attends to the compressed blocks whose last token is not after t; without any, to zeros.
    top_n: selected blocks of block_size tokens: the first, the token's own, the one before, and those with
        the largest weights in the compressed attention (see reference.py for the exact rule). Fewer where
        there are fewer. No gradient flows through the selection.
    window: the nearest tokens, t itself included; it may exceed T.
    scale: default 1/sqrt(D).
    impl: "auto", "triton" (our kernels: D to 256, HQ/H to 64), "chunked" (plain torch), "reference" (T x T).

    Gradients for all tensors and for what `compress` reads. Memory is linear in T; autograd.py says what is
    saved for backward. First derivatives only. `oomph.ops.explain(nsa, ...)` says what would run and why.
    """
    config, choice = _check_and_choose(**locals())
    gates = (gate_cmp, gate_slc, gate_win)
    common.log_choice("nsa", choice)
    dtype = common.matmul_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    ck, cv = compress_keys_and_values(k, v, compress, config)
    if q.numel() == 0:
        return common.depend_on(q, k, v, *gates)
    out: Tensor
    with common.no_autocast(q):
        if choice.impl == "reference":
            out = reference(q, k, v, gates, ck, cv, config)
        elif choice.impl == "chunked":
            out = ChunkedSparseAttention.apply(config, q, k, v, ck, cv, *gates)
        else:  # whether gradients are enabled is read here: inside an autograd function they never are
            out = SparseAttention.apply(config, torch.is_grad_enabled(), q, k, v, ck, cv, *gates)
    return out


def _choose(q: Tensor, k: Tensor, config: NSAConfig, impl: str) -> common.Choice:
    obstacle = why_not_kernels(q, k, common.matmul_dtype(q), config)
    choice = common.choose_triton_or_torch(impl, q, obstacle, kernels="our kernels")
    settings = {"tokens": tokens_per_chunk(q, config)} if choice.impl == "chunked" else {}
    return replace(choice, settings=settings)
