"""The public `rotary`: arguments checked, the table made or taken, the implementation chosen, gradients.

Legend: B batch, H heads, T tokens, D head size, P pairs that are turned (R = 2P numbers of D).
"""

from typing import Any

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.checks import floating, one_of, same_device, same_dtype
from oomph.ops.choice import Choice, announce, explained_by, kernels_or_plain
from oomph.ops.launch import Kernels, why_not_triton
from oomph.ops.rotary_embedding.chunked import rotate_in_slices
from oomph.ops.rotary_embedding.reference import rotary_reference
from oomph.ops.rotary_embedding.table import RotaryTable, Scaling, check_positions, rotary_table
from oomph.ops.uncompiled import uncompiled

IMPLS = ("auto", "reference", "chunked", "triton")
_KERNELS = Kernels("oomph.ops.rotary_embedding.triton")
_HEADS_PER_PROGRAM = 4  # a block of the table is read once for so many heads
_PAIRS_PER_PROGRAM = 1024  # 8 for each of 128 threads


def _choose(q: Tensor, impl: str, **_: Any) -> Choice:
    one_of("impl", impl, IMPLS)
    floating(q=q)
    return kernels_or_plain(
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
    impl: str = "auto",
) -> Any:
    """Rotary position embedding: q turned, or (q, k) turned; new tensors in their dtype and memory layout.

    q, k: [B, H, T, D], or [B, T, H, D] with heads_first=False; the leading B may be missing. k may have
    another number of heads. positions: [T] or [B, T], integers (default 0, 1, ..., T-1); or give `table`,
    made once by `rotary_table` for all layers, and no positions. theta and scaling only make the table.
    fraction: of D that is turned, from the front (Pythia: 0.25); the rest is copied.
    interleaved: pairs are (2i, 2i+1) as in GPT-J instead of (i, i + R/2) as in NeoX and Llama.

    The arithmetic is float32 and rounded once (float64 throughout for float64 inputs, table included).
    Saved for backward: cos and sin alone, shared by all that use the table; the gradient is the rotation by
    the opposite angle, and differentiable again. Out of place: one output and no copy of the input; without
    the kernel, temporaries of a few MiB. Autocast changes nothing here. Under torch.compile the plain
    formula is traced, which the compiler fuses and whose autograd also keeps cos and sin only.
    """
    q_BHTD = _as_bhtd("q", q, heads_first)
    k_BHTD = None if k is None else _as_bhtd("k", k, heads_first)
    one_of("impl", impl, IMPLS)
    if k_BHTD is not None:
        _check_pair(q_BHTD, k_BHTD)
    dim = turned_numbers(q.shape[-1], fraction)
    table_BTP = _table(q_BHTD, positions, table, theta, scaling, dim)
    turn = _turn_traced if torch.compiler.is_compiling() and impl == "auto" else _turn
    new_q = _in_shape(turn(q_BHTD, table_BTP, interleaved, impl), q.shape, heads_first)
    if k is None or k_BHTD is None:
        return new_q
    return new_q, _in_shape(turn(k_BHTD, table_BTP, interleaved, impl), k.shape, heads_first)


@uncompiled  # when an implementation is named, the compiler is to leave it alone
def _turn(x_BHTD: Tensor, table_BTP: RotaryTable, interleaved: bool, impl: str) -> Tensor:
    chosen = announce("rotary", _choose(x_BHTD, impl=impl)).impl
    if chosen == "reference":
        return _turn_traced(x_BHTD, table_BTP, interleaved, chosen)
    turned: Tensor = _Rotation.apply(x_BHTD, table_BTP.cos, table_BTP.sin, interleaved, False, chosen)
    return turned


def _turn_traced(x_BHTD: Tensor, table_BTP: RotaryTable, interleaved: bool, impl: str) -> Tensor:
    return rotary_reference(x_BHTD, table_BTP.cos.unsqueeze(1), table_BTP.sin.unsqueeze(1), interleaved)


def _in_shape(x_BHTD: Tensor, shape: torch.Size, heads_first: bool) -> Tensor:
    return (x_BHTD if heads_first else x_BHTD.transpose(1, 2)).view(shape)


class _Rotation(torch.autograd.Function):
    """Linear in x, so that backward needs the table and nothing of x; the gradient is the same function."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, impl: str
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how = (interleaved, inverse, impl)
        run = _rotate_by_kernel if impl == "triton" else rotate_in_slices
        return run(x, cos, sin, interleaved, inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        interleaved, inverse, impl = ctx.how
        grad_x = _Rotation.apply(grads[0], cos, sin, interleaved, not inverse, impl)
        return grad_x, None, None, None, None, None


def _rotate_by_kernel(
    x_BHTD: Tensor, cos_BTP: Tensor, sin_BTP: Tensor, interleaved: bool, inverse: bool
) -> Tensor:
    out = torch.empty_like(x_BHTD)
    if out.numel() == 0:
        return out
    batch, heads, tokens, size = x_BHTD.shape
    pairs = cos_BTP.shape[-1]
    if cos_BTP.stride() != sin_BTP.stride() or cos_BTP.stride(-1) != 1:  # the kernel reads both alike
        cos_BTP, sin_BTP = cos_BTP.contiguous(), sin_BTP.contiguous()
    pairs_block = _power_of_two(pairs)
    token_block = max(1, min(_PAIRS_PER_PROGRAM // pairs_block, _power_of_two(tokens)))
    token_blocks = -(-tokens // token_block)
    head_groups = -(-heads // _HEADS_PER_PROGRAM)
    kept = size - 2 * pairs
    _KERNELS.launch(
        "rotate",
        (batch * token_blocks * head_groups,),
        x_BHTD,
        out,
        cos_BTP,
        sin_BTP,
        heads,
        tokens,
        *x_BHTD.stride(),
        *out.stride(),
        0 if cos_BTP.shape[0] == 1 else cos_BTP.stride(0),
        cos_BTP.stride(1),
        token_blocks,
        head_groups,
        PAIRS=pairs,
        PAIRS_BLOCK=pairs_block,
        KEPT=kept,
        KEPT_BLOCK=_power_of_two(kept),
        TOKENS=token_block,
        HEADS=_HEADS_PER_PROGRAM,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
    )
    return out


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _as_bhtd(name: str, x: Tensor, heads_first: bool) -> Tensor:
    floating(**{name: x})
    layout = "[B, H, T, D] or [H, T, D]" if heads_first else "[B, T, H, D] or [T, H, D]"
    if x.dim() not in (3, 4):
        raise ArgumentError(f"{name} has shape {list(x.shape)}; valid: {layout}")
    x = x if x.dim() == 4 else x.unsqueeze(0)
    return x if heads_first else x.transpose(1, 2)


def _check_pair(q: Tensor, k: Tensor) -> None:
    same_device(q=q, k=k)
    same_dtype(q=q, k=k)
    if (q.shape[0], q.shape[2:]) != (k.shape[0], k.shape[2:]):
        raise ArgumentError(
            f"q has (B, T, D) = {(q.shape[0], *q.shape[2:])} and k {(k.shape[0], *k.shape[2:])}; only their "
            "number of heads may differ (check heads_first, or turn k in a call of its own)"
        )


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
    q_BHTD: Tensor,
    positions: Tensor | None,
    table: RotaryTable | None,
    theta: float,
    scaling: Scaling,
    dim: int,
) -> RotaryTable:
    """The table as [B or 1, T, P]: the one given, or one for the positions."""
    batch, tokens = q_BHTD.shape[0], q_BHTD.shape[2]
    dtype = torch.float64 if q_BHTD.dtype == torch.float64 else torch.float32
    if table is None:
        if positions is None:
            positions = torch.arange(tokens, device=q_BHTD.device)
        check_positions(positions)
        if tuple(positions.shape) not in ((tokens,), (1, tokens), (batch, tokens)):
            raise ArgumentError(
                f"positions has shape {list(positions.shape)}; valid for B={batch}, T={tokens}: "
                f"[{tokens}] or [{batch}, {tokens}] (check heads_first)"
            )
        same_device(q=q_BHTD, positions=positions)
        table = rotary_table(positions, dim, theta=theta, scaling=scaling, dtype=dtype)
    else:
        if positions is not None:
            raise ArgumentError("both positions and table were given; the table has its positions already")
        _check_table(q_BHTD, table, dim, dtype)
    cos, sin = table.cos, table.sin
    return RotaryTable(*(t if t.dim() == 3 else t.unsqueeze(0) for t in (cos, sin)))


def _check_table(q_BHTD: Tensor, table: RotaryTable, dim: int, dtype: torch.dtype) -> None:
    if not isinstance(table, RotaryTable):
        raise ArgumentError(
            f"table is a {type(table).__name__}, not a RotaryTable; make one with rotary_table"
        )
    batch, tokens = q_BHTD.shape[0], q_BHTD.shape[2]
    valid = ((tokens, dim // 2), (1, tokens, dim // 2), (batch, tokens, dim // 2))
    for name, part in (("cos", table.cos), ("sin", table.sin)):
        if tuple(part.shape) not in valid:
            raise ArgumentError(
                f"table.{name} has shape {list(part.shape)}; valid for B={batch}, T={tokens} and "
                f"{dim} turned numbers: {list(valid[0])} or {list(valid[2])} (check fraction and heads_first)"
            )
        if part.dtype != dtype:
            raise ArgumentError(
                f"table.{name} has dtype {part.dtype}; for {q_BHTD.dtype} inputs it must be {dtype} (was the "
                "table cast?)"
            )
        if part.requires_grad:
            raise ArgumentError(
                f"table.{name} requires a gradient, which rotary does not give; pass it detached"
            )
    if table.cos.shape != table.sin.shape:
        raise ArgumentError(f"table.cos has shape {list(table.cos.shape)} and sin {list(table.sin.shape)}")
    same_device(q=q_BHTD, table=table.cos, sin=table.sin)
