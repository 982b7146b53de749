"""Rotary position embedding: arguments, the table, the choice of implementation, gradients.

Legend: B batch, H heads, T tokens, D head size, P pairs that are rotated (R = 2P numbers of D).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.rotary_embedding.table import RotaryTable, check_positions, rotary_table
from oomph.units import MiB

IMPLS = ("auto", "reference", "chunked", "triton")
_KERNELS = common.Kernels("oomph.ops.rotary_embedding.kernels")
_HEADS_PER_PROGRAM = 4  # a block of the table is read once for so many heads
_PAIRS_PER_PROGRAM = 1024  # 8 for each of 128 threads
_SLICE_BYTES = 2 * MiB  # of x in plain torch, as float32: fits a CPU's cache, and small beside any model


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., D] with the first 2 * cos.shape[-1] numbers rotated; cos and sin broadcast to [..., R/2].

    Pairs are (i, i + R/2), as in NeoX and Llama. Each is a point, which is rotated by its angle. Computed in
    the dtype of cos and rounded to that of x at the end. Autograd saves only cos and sin.
    """
    pairs = cos.shape[-1]
    rotated, passed = x[..., : 2 * pairs].to(cos.dtype), x[..., 2 * pairs :]
    first, second = rotated[..., :pairs], rotated[..., pairs:]
    rotated = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


class _RotationOptions(NamedTuple):
    """A rotation, apart from its table."""

    heads_first: bool
    heads: int | None  # so many are rotated and those after them copied; None: all are rotated
    impl: str
    inverse: bool = False


def _choose(q: Tensor, impl: str, **_: Any) -> common.Choice:
    common.check_one_of("impl", impl, IMPLS)
    common.check_floating(q=q)
    return common.choose_triton_or_torch(
        impl,
        q,
        common.why_not_triton(q),
        kernels="on CUDA one kernel reads the input once and writes the output once",
        plain="plain torch, a slice of tokens at a time",
    )


@common.explained_by(_choose)
def rotary(
    q: Tensor,
    k: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    table: RotaryTable | None = None,
    theta: float = 10000.0,
    fraction: float = 1.0,
    heads_first: bool = True,
    turned_heads: int | None = None,
    impl: str = "auto",
) -> Any:
    """Rotary position embedding of q, or of (q, k); new tensors in their dtype and memory layout.

    q, k: [B, H, T, D], or [B, T, H, D] with heads_first=False; the leading B may be missing. k may have
    another number of heads. positions: [T] or [B, T], integers (default 0, 1, ..., T-1); or give `table`,
    made once by `rotary_table` for all layers, and no positions. theta only makes the table.
    fraction: of D that is rotated, from the front (Pythia: 0.25); the rest is copied.
    turned_heads: of q without k; how many heads, from the front, are rotated (default all), the rest being
    copied. For queries, keys and values of one projection, in one pass: the projection is then free.

    The arithmetic is float32 and rounded once (float64 throughout for float64 inputs, table included).
    Saved for backward: cos and sin alone, shared by all that use the table; the gradient is the rotation by
    the opposite angle, and differentiable again. Out of place: one output and no copy of the input; without
    the kernel, temporaries of a few MiB. Autocast changes nothing here. Under torch.compile the reference is
    traced, which the compiler fuses and whose autograd also saves cos and sin only.
    """
    common.check_one_of("impl", impl, IMPLS)
    common.check_flags(heads_first=heads_first)
    _check_tensors(q, k, heads_first, turned_heads)
    dim = rotary_dim(q.shape[-1], fraction)
    table = _make_or_check_table(q, heads_first, positions, table, theta, dim)
    options = _RotationOptions(heads_first, turned_heads, impl)
    rotate = _rotate_traced if torch.compiler.is_compiling() and impl == "auto" else _rotate
    return rotate(table, options, q, k)


@common.opaque_op  # the compiler does not trace an implementation that was asked for
def _rotate(
    table: RotaryTable, options: _RotationOptions, q: Tensor, k: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    """One autograd node each: where both gradients arrive together, the first is freed before the second."""
    impl = common.log_choice("rotary", _choose(q, impl=options.impl)).impl
    if impl == "reference":
        return _rotate_traced(table, options, q, k)
    options = options._replace(impl=impl)
    rotated = [_Rotation.apply(x, table.cos, table.sin, options) for x in (q, k) if x is not None]
    return rotated[0] if k is None else tuple(rotated)


def _rotate_traced(
    table: RotaryTable, options: _RotationOptions, q: Tensor, k: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    rotated = [_rotated(x, table.cos, table.sin, options) for x in (q, k) if x is not None]
    return rotated[0] if k is None else tuple(rotated)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, options: _RotationOptions) -> Tensor:
    head_dim = -3 if options.heads_first else -2
    rotated, copied = x.tensor_split((options.heads or x.shape[head_dim],), head_dim)
    cos, sin = cos.unsqueeze(head_dim), sin.unsqueeze(head_dim)
    rotated = rotary_reference(rotated, cos, -sin if options.inverse else sin)
    return rotated if options.heads is None else torch.cat((rotated, copied), head_dim)


class _Rotation(common.OpFunction):
    """Linear in x, so that backward needs the table and nothing of x; the gradient is the same function."""

    op = "rotary"

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, options: _RotationOptions) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = options
        return (_rotate_triton if options.impl == "triton" else _rotate_torch)(x, cos, sin, options)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        options = ctx.options._replace(inverse=not ctx.options.inverse)
        return _Rotation.apply(grads[0], cos, sin, options), None, None, None


def _rotate_torch(x: Tensor, cos: Tensor, sin: Tensor, options: _RotationOptions) -> Tensor:
    """The reference on one slice of tokens at a time, which bounds its temporaries."""
    out = torch.empty_like(x)
    token_dim = x.dim() - (2 if options.heads_first else 3)
    tokens = x.shape[token_dim]
    step = max(1, _SLICE_BYTES * tokens // max(1, x.numel() * cos.element_size()))
    for start in range(0, tokens, step):
        count = min(step, tokens - start)
        part = x.narrow(token_dim, start, count)
        cos_part, sin_part = cos.narrow(-2, start, count), sin.narrow(-2, start, count)
        out.narrow(token_dim, start, count).copy_(_rotated(part, cos_part, sin_part, options))
    return out


def _rotate_triton(x: Tensor, cos: Tensor, sin: Tensor, options: _RotationOptions) -> Tensor:
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    shape, strides, out_strides = tuple(x.shape), x.stride(), out.stride()
    if len(shape) == 3:
        shape, strides, out_strides = (1, *shape), (0, *strides), (0, *out_strides)
    batch, heads, tokens, size = shape
    (_, x_head, x_token, _), (_, out_head, out_token, _) = strides, out_strides
    if not options.heads_first:
        heads, tokens = tokens, heads
        x_head, x_token, out_head, out_token = x_token, x_head, out_token, out_head
    table_strides = cos.stride()
    if table_strides != sin.stride() or table_strides[-1] != 1:  # the kernel reads both alike
        cos, sin = cos.contiguous(), sin.contiguous()
        table_strides = cos.stride()
    pairs = cos.shape[-1]
    pairs_block = common.power_of_two(pairs)
    token_block = max(1, min(_PAIRS_PER_PROGRAM // pairs_block, common.power_of_two(tokens)))
    token_blocks = -(-tokens // token_block)
    head_groups = -(-heads // _HEADS_PER_PROGRAM)
    copied = size - 2 * pairs
    _KERNELS.launch(
        "rotate",
        (batch * token_blocks * head_groups,),
        *(x, out, cos, sin),
        *(heads, heads if options.heads is None else options.heads, tokens),
        *(strides[0], x_head, x_token, strides[3]),
        *(out_strides[0], out_head, out_token, out_strides[3]),
        table_strides[0] if cos.dim() == 3 and cos.shape[0] > 1 else 0,
        table_strides[-2],
        *(token_blocks, head_groups),
        PAIRS=pairs,
        PAIRS_BLOCK=pairs_block,
        COPIED=copied,
        COPIED_BLOCK=common.power_of_two(copied),
        TOKENS=token_block,
        HEADS=_HEADS_PER_PROGRAM,
        COPIES_HEADS=options.heads is not None,
        INVERSE=options.inverse,
    )
    return out


def rotary_dim(head_dim: int, fraction: float) -> int:
    """How many numbers of a head are rotated."""
    common.check_number("a number in (0, 1], e.g. 0.25", lambda number: 0 < number <= 1, fraction=fraction)
    dim = int(head_dim * fraction + 1e-6)  # 0.3 of 80 is 23.999...
    if dim < 2 or dim % 2:
        raise ArgumentError(
            f"fraction={fraction} of head size {head_dim} rotates {dim} numbers; rotary rotates pairs, so an "
            "even number >= 2"
        )
    return dim


# Checks ----------------------------------------------------------------------------------------------


def _check_tensors(q: Tensor, k: Tensor | None, heads_first: bool, turned_heads: int | None) -> None:
    for name, x in common.not_none(q=q, k=k).items():
        common.check_floating(**{name: x})
        if x.dim() not in (3, 4):
            layout = "[B, H, T, D] or [H, T, D]" if heads_first else "[B, T, H, D] or [T, H, D]"
            raise ArgumentError(f"{name} has shape {list(x.shape)}; valid: {layout}")
    if k is not None:
        common.check_same_device(q=q, k=k)
        common.check_same_dtype(q=q, k=k)
        if _sizes(q, heads_first) != _sizes(k, heads_first):
            raise ArgumentError(
                f"q has (B, T, D) = {_sizes(q, heads_first)} and k {_sizes(k, heads_first)}; only their "
                "number of heads may differ (check heads_first, or rotate k in a call of its own)"
            )
    if turned_heads is None:
        return
    if k is not None:
        raise ArgumentError("turned_heads is for q alone, of which it takes a part; leave k out")
    common.check_whole(turned_heads=turned_heads)
    heads = q.shape[-3 if heads_first else -2]
    if turned_heads > heads:
        raise ArgumentError(f"turned_heads={turned_heads!r} is not valid; q has heads 1 to {heads}")


def _sizes(x: Tensor, heads_first: bool) -> tuple[int, int, int]:
    """B (1 where it is missing), T and D."""
    shape = x.shape
    return shape[0] if len(shape) == 4 else 1, shape[-2 if heads_first else -3], shape[-1]


def _make_or_check_table(
    q: Tensor, heads_first: bool, positions: Tensor | None, table: RotaryTable | None, theta: float, dim: int
) -> RotaryTable:
    """The table as [T, P] or [B or 1, T, P]: the one given, or one for the positions."""
    batch, tokens, _ = _sizes(q, heads_first)
    leading = ((tokens,), (1, tokens), (batch, tokens))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if table is None:
        positions = torch.arange(tokens, device=q.device) if positions is None else positions
        check_positions(positions)
        if tuple(positions.shape) not in leading:
            raise ArgumentError(
                f"positions has shape {list(positions.shape)}; valid for B={batch}, T={tokens}: "
                f"[{tokens}] or [{batch}, {tokens}] (check heads_first)"
            )
        common.check_same_device(q=q, positions=positions)
        return rotary_table(positions, dim, theta=theta, dtype=dtype)
    if positions is not None:
        raise ArgumentError("both positions and table were given; the table has its positions already")
    if not isinstance(table, RotaryTable):
        raise ArgumentError(
            f"table is a {type(table).__name__}, not a RotaryTable; make one with rotary_table"
        )
    for name, part in (("cos", table.cos), ("sin", table.sin)):
        if part.shape != table.cos.shape or part.shape not in [(*lead, dim // 2) for lead in leading]:
            raise ArgumentError(
                f"table.{name} has shape {list(part.shape)}; valid for B={batch}, T={tokens} and {dim} "
                f"rotated numbers: {[tokens, dim // 2]} or {[batch, tokens, dim // 2]} (check fraction and "
                "heads_first)"
            )
        if part.dtype != dtype:
            raise ArgumentError(
                f"table.{name} has dtype {part.dtype}; for {q.dtype} inputs it must be {dtype} (was the "
                "table cast?)"
            )
        if part.requires_grad:
            raise ArgumentError(f"table.{name} requires a gradient, which rotary does not compute; detach it")
    common.check_same_device(q=q, table=table.cos, sin=table.sin)
    return table
