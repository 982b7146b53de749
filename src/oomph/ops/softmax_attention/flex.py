"""FlexAttention: a bias function inside one compiled kernel, on CUDA.

The kernel is compiled once per kind of call (dtype, head size, the bias function's code, causality), and
again for the first shapes that differ, until torch treats sizes as dynamic. Each compilation takes 5 to 10
seconds and prints nothing.
"""

import functools
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from oomph import torch_internals
from oomph.ops.common import OpFunction, is_fake, no_compile, refuse_second_derivatives, why_not_triton
from oomph.ops.softmax_attention.arguments import AttentionArguments
from oomph.ops.softmax_attention.biases import BiasFunction

_BLOCK = 128  # of the causal BlockMask
_RECOMPILE_LIMIT = 256  # kinds of calls per process; torch's default is 8
BlockTable = tuple[Tensor, Tensor]  # counts [1, 1, rows] and indices [1, 1, rows, columns], int32


def why_not_flex(a: AttentionArguments) -> str | None:
    """Why FlexAttention cannot, or should not, run the call; None where it can."""
    if a.q.device.type != "cuda":
        return f"the tensors are on {a.q.device.type}"
    if a.bias_function is None:
        return "no bias function"
    if a.pattern is not None or a.has_padding:
        return "a bias function with a pattern or padding"
    reason = why_not_triton(a.q)
    if reason is None and not is_fake(a.q) and not _has_c_compiler():
        reason = "no C compiler, which Triton needs"
    if reason is not None:
        return reason
    if a.q.dtype not in (torch.float16, torch.bfloat16):
        return f"slower than chunks in {str(a.q.dtype).removeprefix('torch.')}"
    if a.has_empty:
        return "an empty tensor"
    if a.bias_needs_grad:
        return "the bias needs a gradient"
    if min(a.q.shape[3], a.v.shape[3]) < 16:
        return "head sizes below 16"
    return None


@functools.cache
def _has_c_compiler() -> bool:
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))


@no_compile
def flex(a: AttentionArguments) -> Tensor:
    assert a.bias_function is not None
    if is_fake(a.q):
        out: Tensor = _FlexAllocations.apply(a.q, a.k, a.v)  # type: ignore[no-untyped-call]
        return out
    tables = _causal_block_tables(a.queries, a.keys, a.q.device) if a.masks_future else None
    with torch_internals.dynamo_config_patch(recompile_limit=_RECOMPILE_LIMIT):
        out = _compiled_flex()(a.q, a.k, a.v, a.bias_function, tables, a.offset, a.scale)
    return out


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # fullgraph: beyond the recompile limit torch would silently fall back to the whole score matrix.
    return torch.compile(_flex, fullgraph=True)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: BiasFunction,
    tables: tuple[BlockTable, BlockTable, BlockTable, BlockTable] | None,
    offset: int,
    scale: float,
) -> Tensor:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return score + bias(b, h, q_index, k_index)

    def mask_mod(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return k_index <= q_index + offset

    mask = None
    if tables is not None:
        kv_partial, kv_full, q_partial, q_full = tables
        lengths = (q.shape[2], k.shape[2])
        mask = BlockMask(lengths, *kv_partial, *kv_full, *q_partial, *q_full, (_BLOCK, _BLOCK), mask_mod)
    # The kernel for short queries is another one, which has no backward.
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True}
    out: Tensor = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=options,
    )
    return out


@functools.lru_cache(maxsize=32)  # a model uses the same tables in every layer and step
def _causal_block_tables(
    queries: int, keys: int, device: torch.device
) -> tuple[BlockTable, BlockTable, BlockTable, BlockTable]:
    """BlockMask's tables: partial and full key blocks of each query block, then of each key block."""
    rows, columns = -(-queries // _BLOCK), -(-keys // _BLOCK)
    first = torch.arange(rows)[:, None] * _BLOCK + keys - queries  # position of a block's first query
    last = torch.minimum(first + _BLOCK, torch.tensor(keys)) - 1
    begin = torch.arange(columns) * _BLOCK
    # A full block is read without bounds checks, so blocks at the ragged end are partial.
    ragged = (begin + _BLOCK > keys) | (first + _BLOCK > keys)
    allowed, full = begin <= last, (begin + _BLOCK - 1 <= first) & ~ragged
    partial = allowed & ~full
    return (
        _block_table(partial, device),
        _block_table(full, device),
        _block_table(partial.T, device),
        _block_table(full.T, device),
    )


def _block_table(blocks: Tensor, device: torch.device) -> BlockTable:
    counts = blocks.sum(1, dtype=torch.int32)
    indices = torch.argsort(~blocks, dim=1, stable=True).to(torch.int32)  # selected blocks first, in order
    return counts.to(device)[None, None], indices.contiguous().to(device)[None, None]


class _FlexAllocations(OpFunction):
    """For predictions: the allocations of the compiled kernels, as recorded with torch 2.11 on an H200."""

    op = "attention"

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        largest_score = torch.empty_like(lse)  # freed when the call ends
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        ctx.save_for_backward(q, k, v, out, lse)
        del largest_score
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        refuse_second_derivatives("attention")
        q, k, v, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)
        gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        del delta
        return gradients
