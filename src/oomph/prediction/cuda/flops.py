"""Floating-point operations of the ops that are worth counting: products, convolutions, attention.

A product of an M x K with a K x N matrix takes 2 M N K. Everything else is bound by the bytes it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from oomph.prediction.cuda.temporaries import bind

aten = torch.ops.aten
Tensor = torch.Tensor
_TILE = 128  # the side of the tile of a result that one multiprocessor commonly makes
_ALIGNMENT = 16  # bytes


class Flops(NamedTuple):
    """The arithmetic of one op, and how it can be spread over a GPU."""

    flops: float
    dtype: torch.dtype
    kind: (
        str  # "product", "unaligned product", "convolution", "depthwise convolution", "cudnn attention", ...
    )
    tiles: int = 0  # of the result, each a multiprocessor's work; 0: enough of them
    depth: int = 0  # the length of a product's sums, which may be split too; the width of attention's heads


Rule = Callable[[OpOverload, Sequence[Any], Mapping[str, Any], Any], Flops]


def flops_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops | None:
    rule = _RULES.get(func)
    return rule(func, args, kwargs, out) if rule is not None else None


def _multiplied(left: Tensor, right: Tensor, item: int) -> Flops:
    """Of [..., M, K] with [..., K, N]."""
    *batch, rows, depth = left.shape
    columns = right.shape[-1]
    count = 1
    for size in batch:
        count *= size
    tiles = count * -(-rows // _TILE) * -(-columns // _TILE)
    aligned = item != 2 or not (columns % 8 or _pitch(left) % 8 or _pitch(right) % 8)
    kind = "product" if aligned else "unaligned product"
    return Flops(2.0 * count * rows * columns * depth, left.dtype, kind, tiles, depth)


def _pitch(matrix: Tensor) -> int:
    """How far apart two rows (or columns) lie in memory, in elements; 0 where there is only one."""
    down, across = matrix.stride()[-2:]
    rows, columns = matrix.shape[-2:]
    if across == 1 and columns > 1:
        return down if rows > 1 else 0
    return across if columns > 1 else 0


def _product(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    left, right = args[0], args[1]
    return _multiplied(left, right, left.element_size())


def _product_and_sum(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    return _multiplied(args[1], args[2], args[1].element_size())


def _grouped(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    """Groups of rows, each with its own matrix; or of a long sum, each with its own result."""
    left, right = args[0], args[1]
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1
    return Flops(2.0 * left.numel() * right.shape[-1] / groups, left.dtype, "product")


def _convolution(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    input, weight, transposed = args[0], args[1], args[6]
    return _convolved(input if transposed else out, weight, 1)


def _convolution_backward(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Flops:
    gradient, input, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return _convolved(input if transposed else gradient, weight, int(wanted[0]) + int(wanted[1]))


def _convolved(places: Tensor, weight: Tensor, times: int) -> Flops:
    """Every weight once at each place of the result (of the input, where the convolution is transposed)."""
    positions = places.numel() // max(places.shape[1], 1)
    kind = "depthwise convolution" if weight.shape[1] == 1 else "convolution"
    return Flops(2.0 * positions * weight.numel() * times, weight.dtype, kind)


def _attention(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    """Scores and their product with the values; backward: the scores again, and four gradients."""
    call = bind(func, args, kwargs)
    query, key, value = call["query"], call["key"], call["value"]
    pairs = query.numel() // max(query.shape[-1], 1) * key.shape[-2]
    if call["is_causal"]:
        pairs /= 2
    width, result = query.shape[-1], value.shape[-1]
    each = 3 * width + 2 * result if "backward" in func._opname else width + result
    backend = func._opname.removeprefix("_scaled_dot_product_").split("_")[0]
    return Flops(2.0 * pairs * each, query.dtype, f"{backend} attention", depth=width)


def _found(packet: Any, *overloads: str) -> list[OpOverload]:
    """The overloads that this version of torch has."""
    return [getattr(packet, name) for name in overloads if name in packet.overloads()]


_RULES: dict[OpOverload, Rule] = {
    **dict.fromkeys(
        [*_found(aten.mm, "default", "dtype"), *_found(aten.bmm, "default", "dtype")],
        _product,
    ),
    **dict.fromkeys(
        [
            *_found(aten.mm, "out", "dtype_out"),
            *_found(aten.bmm, "out", "dtype_out"),
        ],
        _product,
    ),
    **dict.fromkeys(
        [
            *_found(aten.addmm, "default", "dtype", "out", "dtype_out"),
            *_found(aten.addmm_, "default"),
            *_found(aten.baddbmm, "default", "dtype", "out", "dtype_out"),
            *_found(aten.baddbmm_, "default"),
            *_found(aten._addmm_activation, "default"),
        ],
        _product_and_sum,
    ),
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    **{
        getattr(aten, f"_scaled_dot_product_{backend}_attention{direction}").default: _attention
        for backend in ("flash", "efficient", "cudnn")
        for direction in ("", "_backward")
    },
}
if hasattr(aten, "_grouped_mm"):
    _RULES[aten._grouped_mm.default] = _grouped
