"""The public `rotary`: arguments checked, the table made or taken, the implementation chosen, gradients.

Legend: B batch, H heads, T tokens, D head size, P pairs that are turned (R = 2P numbers of D).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.common import (
    Choice,
    check_floating,
    check_one_of,
    check_same_device,
    check_same_dtype,
    choose_triton_or_torch,
    explained_by,
    log_choice,
    no_compile,
)
from oomph.ops.launch import Kernels, why_not_triton
from oomph.ops.rotary_embedding.chunked import EVERY, rotate_in_slices
from oomph.ops.rotary_embedding.reference import rotary_reference
from oomph.ops.rotary_embedding.table import RotaryTable, Scaling, check_positions, rotary_table

IMPLS = ("auto", "reference", "chunked", "triton")
_KERNELS = Kernels("oomph.ops.rotary_embedding.triton")
_HEADS_PER_PROGRAM = 4  # a block of the table is read once for so many heads
_PAIRS_PER_PROGRAM = 1024  # 8 for each of 128 threads


class _How(NamedTuple):
    """What a rotation does beside the table."""

    interleaved: bool
    heads_first: bool
    heads: int  # so many are turned; those after them are copied
    impl: str
    inverse: bool = False


def _choose(q: Tensor, impl: str, **_: Any) -> Choice:
    check_one_of("impl", impl, IMPLS)
    check_floating(q=q)
    return choose_triton_or_torch(
        impl,
        q,
        why_not_triton(q),
        kernels="on CUDA one kernel reads the input once and writes the output once",
        plain="plain torch, a slice of tokens at a time",
    )


@explained_by(_choose)
def rotary(
    q: Tensor,
    k: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    table: RotaryTable | None = None,
    theta: float = 10000.0,
    scaling: Scaling = None,
    fraction: float = 1.0,
    interleaved: bool = False,
    heads_first: bool = True,
    turned_heads: int | None = None,
    impl: str = "auto",
) -> Any:
    """Rotary position embedding: q turned, or (q, k) turned; new tensors in their dtype and memory layout.

    q, k: [B, H, T, D], or [B, T, H, D] with heads_first=False; the leading B may be missing. k may have
    another number of heads. positions: [T] or [B, T], integers (default 0, 1, ..., T-1); or give `table`,
    made once by `rotary_table` for all layers, and no positions. theta and scaling only make the table.
    fraction: of D that is turned, from the front (Pythia: 0.25); the rest is copied.
    interleaved: pairs are (2i, 2i+1) as in GPT-J instead of (i, i + R/2) as in NeoX and Llama.
    turned_heads: of q without k; how many heads, from the front, are turned (default all), the rest being
    copied. For queries, keys and values of one projection, in one pass: what was projected is then free.

    The arithmetic is float32 and rounded once (float64 throughout for float64 inputs, table included).
    Saved for backward: cos and sin alone, shared by all that use the table; the gradient is the rotation by
    the opposite angle, and differentiable again. Out of place: one output and no copy of the input; without
    the kernel, temporaries of a few MiB. Autocast changes nothing here. Under torch.compile the plain
    formula is traced, which the compiler fuses and whose autograd also keeps cos and sin only.
    """
    check_one_of("impl", impl, IMPLS)
    _check_dims("q", q, heads_first)
    if k is not None:
        _check_dims("k", k, heads_first)
        _check_pair(q, k, heads_first)
    heads = _heads_to_turn(q.shape[-3 if heads_first else -2], turned_heads, k)
    dim = turned_numbers(q.shape[-1], fraction)
    table = _table(q, heads_first, positions, table, theta, scaling, dim)
    turn = _turn_traced if torch.compiler.is_compiling() and impl == "auto" else _turn
    how = _How(interleaved, heads_first, heads, impl)
    if k is None:
        return turn(table, how, q)[0]
    return turn(table, how, q, k)


@no_compile  # when an implementation is named, the compiler is to leave it alone
def _turn(table: RotaryTable, how: _How, *tensors: Tensor) -> tuple[Tensor, ...]:
    """One node each: where the gradients of two arrive together, the first is freed before the second."""
    chosen = log_choice("rotary", _choose(tensors[0], impl=how.impl)).impl
    if chosen == "reference":
        return _turn_traced(table, how, *tensors)
    how = how._replace(impl=chosen)
    return tuple(_Rotation.apply(x, table.cos, table.sin, how) for x in tensors)


def _turn_traced(table: RotaryTable, how: _How, *tensors: Tensor) -> tuple[Tensor, ...]:
    token_first = how.heads_first is False
    # A dimension for the heads, where the tensors have it.
    cos, sin = (part.unsqueeze(-2 if token_first else -3) for part in (table.cos, table.sin))
    return tuple(_reference(x, cos, sin, how) for x in tensors)


def _reference(x: Tensor, cos: Tensor, sin: Tensor, how: _How) -> Tensor:
    dim = -3 if how.heads_first else -2
    if how.heads == EVERY:
        return rotary_reference(x, cos, sin, how.interleaved)
    turned, kept = x.tensor_split((how.heads,), dim)
    return torch.cat((rotary_reference(turned, cos, sin, how.interleaved), kept), dim)


class _Rotation(torch.autograd.Function):
    """Linear in x, so that backward needs the table and nothing of x; the gradient is the same function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how = how
        return (_rotate_by_kernel if how.impl == "triton" else _rotate_by_torch)(x, cos, sin, how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        how = ctx.how._replace(inverse=not ctx.how.inverse)
        return _Rotation.apply(grads[0], cos, sin, how), None, None, None


def _rotate_by_torch(x: Tensor, cos: Tensor, sin: Tensor, how: _How) -> Tensor:
    x_BHTD = x if x.dim() == 4 else x.unsqueeze(0)
    x_BHTD = x_BHTD if how.heads_first else x_BHTD.transpose(1, 2)
    cos, sin = (part if part.dim() == 3 else part.unsqueeze(0) for part in (cos, sin))
    out_BHTD = rotate_in_slices(x_BHTD, cos, sin, how.interleaved, how.inverse, how.heads)
    return (out_BHTD if how.heads_first else out_BHTD.transpose(1, 2)).view(x.shape)


def _rotate_by_kernel(x: Tensor, cos: Tensor, sin: Tensor, how: _How) -> Tensor:
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    shape, strides, out_strides = tuple(x.shape), x.stride(), out.stride()
    if len(shape) == 3:
        shape, strides, out_strides = (1, *shape), (0, *strides), (0, *out_strides)
    batch, heads, tokens, size = shape
    (_, x_head, x_token, _), (_, out_head, out_token, _) = strides, out_strides
    if not how.heads_first:
        heads, tokens = tokens, heads
        x_head, x_token, out_head, out_token = x_token, x_head, out_token, out_head
    table_strides = cos.stride()
    if table_strides != sin.stride() or table_strides[-1] != 1:  # the kernel reads both alike
        cos, sin = cos.contiguous(), sin.contiguous()
        table_strides = cos.stride()
    pairs = cos.shape[-1]
    pairs_block = _power_of_two(pairs)
    token_block = max(1, min(_PAIRS_PER_PROGRAM // pairs_block, _power_of_two(tokens)))
    token_blocks = -(-tokens // token_block)
    head_groups = -(-heads // _HEADS_PER_PROGRAM)
    kept = size - 2 * pairs
    _KERNELS.launch(
        "rotate",
        (batch * token_blocks * head_groups,),
        x,
        out,
        cos,
        sin,
        heads,
        heads if how.heads == EVERY else how.heads,
        tokens,
        strides[0],
        x_head,
        x_token,
        strides[3],
        out_strides[0],
        out_head,
        out_token,
        out_strides[3],
        table_strides[0] if cos.dim() == 3 and cos.shape[0] > 1 else 0,
        table_strides[-2],
        token_blocks,
        head_groups,
        PAIRS=pairs,
        PAIRS_BLOCK=pairs_block,
        KEPT=kept,
        KEPT_BLOCK=_power_of_two(kept),
        TOKENS=token_block,
        HEADS=_HEADS_PER_PROGRAM,
        SOME=how.heads != EVERY,
        INTERLEAVED=how.interleaved,
        INVERSE=how.inverse,
    )
    return out


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _check_dims(name: str, x: Tensor, heads_first: bool) -> None:
    check_floating(**{name: x})
    if x.dim() not in (3, 4):
        layout = "[B, H, T, D] or [H, T, D]" if heads_first else "[B, T, H, D] or [T, H, D]"
        raise ArgumentError(f"{name} has shape {list(x.shape)}; valid: {layout}")


def _sizes(x: Tensor, heads_first: bool) -> tuple[int, int, int]:
    """B (1 where it is missing), T and D."""
    shape = x.shape
    return shape[0] if len(shape) == 4 else 1, shape[-2 if heads_first else -3], shape[-1]


def _check_pair(q: Tensor, k: Tensor, heads_first: bool) -> None:
    check_same_device(q=q, k=k)
    check_same_dtype(q=q, k=k)
    sizes_of_q, sizes_of_k = _sizes(q, heads_first), _sizes(k, heads_first)
    if sizes_of_q != sizes_of_k:
        raise ArgumentError(
            f"q has (B, T, D) = {sizes_of_q} and k {sizes_of_k}; only their "
            "number of heads may differ (check heads_first, or turn k in a call of its own)"
        )


def _heads_to_turn(heads: int, turned_heads: int | None, k: Tensor | None) -> int:
    if turned_heads is None:
        return EVERY
    if k is not None:
        raise ArgumentError("turned_heads is for q alone, of which it takes a part; leave k out")
    if isinstance(turned_heads, bool) or not isinstance(turned_heads, int) or not 0 < turned_heads <= heads:
        raise ArgumentError(f"turned_heads={turned_heads!r} is not valid; q has heads 1 to {heads}")
    return turned_heads


def turned_numbers(size: int, fraction: float) -> int:
    """How many numbers of a head are turned."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ArgumentError(f"fraction={fraction!r} is not valid; it is in (0, 1], e.g. 0.25")
    dim = int(size * fraction + 1e-6)  # 0.3 of 80 is 23.999...
    if dim < 2 or dim % 2:
        raise ArgumentError(
            f"fraction={fraction} of head size {size} turns {dim} numbers; rotary turns pairs, so an even "
            "number >= 2"
        )
    return dim


def _table(
    q: Tensor,
    heads_first: bool,
    positions: Tensor | None,
    table: RotaryTable | None,
    theta: float,
    scaling: Scaling,
    dim: int,
) -> RotaryTable:
    """The table as [T, P] or [B or 1, T, P]: the one given, or one for the positions."""
    batch, tokens, _ = _sizes(q, heads_first)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if table is not None:
        if positions is not None:
            raise ArgumentError("both positions and table were given; the table has its positions already")
        _check_table(q, table, batch, tokens, dim, dtype)
        return table
    if positions is None:
        positions = torch.arange(tokens, device=q.device)
    check_positions(positions)
    if tuple(positions.shape) not in ((tokens,), (1, tokens), (batch, tokens)):
        raise ArgumentError(
            f"positions has shape {list(positions.shape)}; valid for B={batch}, T={tokens}: "
            f"[{tokens}] or [{batch}, {tokens}] (check heads_first)"
        )
    check_same_device(q=q, positions=positions)
    return rotary_table(positions, dim, theta=theta, scaling=scaling, dtype=dtype)


def _check_table(
    q: Tensor, table: RotaryTable, batch: int, tokens: int, dim: int, dtype: torch.dtype
) -> None:
    if not isinstance(table, RotaryTable):
        raise ArgumentError(
            f"table is a {type(table).__name__}, not a RotaryTable; make one with rotary_table"
        )
    valid = ((tokens, dim // 2), (1, tokens, dim // 2), (batch, tokens, dim // 2))
    for name, part in (("cos", table.cos), ("sin", table.sin)):
        if part.shape not in valid:
            raise ArgumentError(
                f"table.{name} has shape {list(part.shape)}; valid for B={batch}, T={tokens} and "
                f"{dim} turned numbers: {list(valid[0])} or {list(valid[2])} (check fraction and heads_first)"
            )
        if part.dtype != dtype:
            raise ArgumentError(
                f"table.{name} has dtype {part.dtype}; for {q.dtype} inputs it must be {dtype} (was the "
                "table cast?)"
            )
        if part.requires_grad:
            raise ArgumentError(
                f"table.{name} requires a gradient, which rotary does not give; pass it detached"
            )
    if table.cos.shape != table.sin.shape:
        raise ArgumentError(f"table.cos has shape {list(table.cos.shape)} and sin {list(table.sin.shape)}")
    check_same_device(q=q, table=table.cos, sin=table.sin)
