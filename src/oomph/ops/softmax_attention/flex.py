"""FlexAttention: a bias function inside one compiled kernel, on CUDA.

The kernel is compiled once per kind of call (dtype, head size, the bias function's code, causality), and
again for the first shapes that differ, until torch treats sizes as variable. Each time takes 5 to 10 seconds,
in which nothing is printed.
"""

import functools
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from oomph.ops.common import no_compile
from oomph.ops.launch import is_fake, why_not_triton
from oomph.ops.softmax_attention.biases import BiasFunction
from oomph.ops.softmax_attention.flex_stand_in import flex_stand_in
from oomph.ops.softmax_attention.problem import Problem

_BLOCK = 128  # of the tables that tell which blocks of keys causality leaves
_KINDS_OF_CALLS = 256  # that may be compiled in one process; torch's own limit is 8
Table = tuple[Tensor, Tensor]  # counts [1, 1, rows] and numbers [1, 1, rows, columns] of int32
_HALF = (torch.float16, torch.bfloat16)


def why_not_flex(p: Problem) -> str | None:
    """Why FlexAttention cannot, or should not, run the call; None where it can."""
    if p.q.device.type != "cuda":
        return f"the tensors are on {p.q.device.type}"
    if p.bias_function is None:
        return "no bias function"
    if p.pattern is not None or p.padded:
        return "a bias function with a pattern or padding"
    objection = why_not_triton(p.q)
    if objection is None and not is_fake(p.q) and not _has_compiler():
        objection = "no C compiler, which Triton needs"
    if objection is not None:
        return objection
    if p.q.dtype not in _HALF:
        return f"slower than chunks in {str(p.q.dtype).removeprefix('torch.')}"
    if 0 in (p.q.numel(), p.k.numel(), p.v.numel()):
        return "an empty tensor"
    if p.bias_needs_grad:
        return "the bias needs a gradient"
    if min(p.q.shape[3], p.v.shape[3]) < 16:
        return "head sizes below 16"
    return None


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in ("cc", "gcc", "clang"))


@no_compile
def flex(p: Problem) -> Tensor:
    assert p.bias_function is not None
    if is_fake(p.q):
        return flex_stand_in(p.q, p.k, p.v)
    tables = _causal_blocks(p.queries, p.keys, p.q.device) if p.cuts_future else None
    with torch._dynamo.config.patch(recompile_limit=_KINDS_OF_CALLS):
        out: Tensor = _compiled()(p.q, p.k, p.v, p.bias_function, tables, p.offset, p.scale)
    return out


@functools.cache
def _compiled() -> Callable[..., Any]:
    # fullgraph: beyond its limit of recompilations torch would fall back to the whole score matrix, silently.
    return torch.compile(_flex, fullgraph=True)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: BiasFunction,
    tables: tuple[Table, Table, Table, Table] | None,
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
    # The kernel for short queries is another one, without a backward of its own.
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


@functools.lru_cache(maxsize=32)
def _causal_blocks(queries: int, keys: int, device: torch.device) -> tuple[Table, Table, Table, Table]:
    """Per block of queries the blocks of keys it sees in part and in full; then the same the other way round.

    Kept, because a model asks for the same ones in every layer and step.
    """
    rows, columns = -(-queries // _BLOCK), -(-keys // _BLOCK)
    first = torch.arange(rows)[:, None] * _BLOCK + keys - queries  # position of a block's first query
    last = torch.minimum(first + _BLOCK, torch.tensor(keys)) - 1
    begin = torch.arange(columns) * _BLOCK
    # The last block may be ragged: a full one is read without any check of its length.
    ragged = (begin + _BLOCK > keys) | (first + _BLOCK > keys)
    seen, whole = begin <= last, (begin + _BLOCK - 1 <= first) & ~ragged
    partial = seen & ~whole
    made = (partial, whole, partial.T, whole.T)
    return tuple(_table(kept, device) for kept in made)  # type: ignore[return-value]


def _table(kept: Tensor, device: torch.device) -> Table:
    counts = kept.sum(1, dtype=torch.int32)
    # The numbers of the kept blocks first, in rising order.
    numbers = torch.argsort(~kept, dim=1, stable=True).to(torch.int32)
    return counts.to(device)[None, None], numbers.contiguous().to(device)[None, None]
