"""Masks of two values, known without their data: one on and below a diagonal, another above it.

What `torch.tril(torch.ones(n, n))` and its relatives hold, and what it becomes by comparisons, slices and
changes of dtype. `made_by` and `after` follow a program's calls; what they do not know is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Number = bool | int | float


@dataclass(frozen=True)
class Triangle:
    """[.., rows, columns], the same over leading dimensions: `below` where column <= row + diagonal."""

    shape: tuple[int, ...]
    diagonal: int
    below: Number
    above: Number
    dtype: torch.dtype

    @property
    def is_uniform(self) -> bool:
        return self.below == self.above

    def tensor(self, device: torch.device) -> Tensor:
        """With data."""
        below, above = (torch.full((), value, dtype=self.dtype, device=device) for value in self._values)
        if self.is_uniform or len(self.shape) < 2:
            return below.expand(self.shape).contiguous()
        lower = torch.ones(self.shape[-2:], dtype=torch.bool, device=device).tril(self.diagonal)
        return torch.where(lower, below, above).expand(self.shape).contiguous()

    @property
    def _values(self) -> tuple[Number, Number]:
        return self.below, self.above

    @property
    def pair(self) -> Tensor:
        """Both values, on the host."""
        return torch.tensor(self._values, dtype=self.dtype, device="cpu")

    def with_pair(self, pair: Tensor) -> Triangle:
        below, above = pair.tolist()
        return replace(self, below=below, above=above, dtype=pair.dtype)


def found_in(tensor: Tensor) -> Triangle | None:
    """What a tensor with data holds, if it is a triangle of a square with two values."""
    shape = tuple(tensor.shape)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 2 or math.prod(shape) != shape[-1] ** 2:
        return None
    square = tensor.detach().reshape(shape[-2:])
    below, above = square[-1, 0].item(), square[0, -1].item()
    if below == above or isinstance(below, complex):
        return None
    claimed = Triangle(shape, 0, below, above, tensor.dtype)
    # In slices of rows: the comparison of a large mask should not need several times its memory.
    columns = torch.arange(shape[-1], device=square.device)
    for start in range(0, shape[-1], 1024):
        rows = torch.arange(start, min(start + 1024, shape[-1]), device=square.device)
        low = columns <= rows[:, None]
        if not torch.equal(square[start : start + 1024], _fill(low, claimed, square.device)):
            return None
    return claimed


def _fill(low: Tensor, triangle: Triangle, device: torch.device) -> Tensor:
    below, above = triangle.pair.to(device)
    return torch.where(low, below, above)


def made_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Tensor) -> Triangle | None:
    """What a function that makes constants has made."""
    value: Any = None
    if name in ("ones", "new_ones", "ones_like"):
        value = 1
    elif name in ("zeros", "new_zeros", "zeros_like"):
        value = 0
    elif name in ("full", "full_like"):
        value = args[1] if len(args) > 1 else kwargs.get("fill_value")
    elif name == "new_full":
        value = args[2] if len(args) > 2 else kwargs.get("fill_value")
    elif name in ("tensor", "scalar_tensor", "new_tensor") and made.dim() == 0:
        value = args[-1] if args else kwargs.get("data")
    if not isinstance(value, bool | int | float) or made.requires_grad or made.is_complex():
        return None
    if made.dtype == torch.bool:
        value = bool(value)
    return Triangle(tuple(made.shape), 0, value, value, made.dtype)


def after(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Triangle | None:
    """What a call gives, whose tensor arguments are all triangles (in the place of tensors)."""
    first = args[0] if args else None
    if name in _VIEWS and isinstance(first, Triangle):
        return _VIEWS[name](first, *args[1:], **kwargs)
    if name in _ELEMENTWISE:
        return _elementwise(name, args, kwargs)
    return None


def _cut(triangle: Triangle, diagonal: int = 0, *, lower: bool) -> Triangle | None:
    """tril, triu: of what is the same everywhere, or of a triangle that it leaves as it was."""
    if len(triangle.shape) < 2:
        return None
    zero = False if triangle.dtype == torch.bool else 0
    if not triangle.is_uniform:
        kept = triangle.above == 0 if lower else triangle.below == 0
        bound = triangle.diagonal if lower else triangle.diagonal + 1
        return triangle if kept and diagonal == bound else None
    if lower:
        return replace(triangle, diagonal=diagonal, above=zero)
    return replace(triangle, diagonal=diagonal - 1, below=zero)


def _sliced(triangle: Triangle, index: Any) -> Triangle | None:
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is not None and part is not ... and not _is_plain(part) for part in parts):
        return None
    taken = sum(part is not None and part is not ... for part in parts)
    rest = len(triangle.shape) - taken
    if rest < 0 or parts.count(...) > 1:
        return None
    if ... not in parts:
        parts.append(...)
    at = parts.index(...)
    parts[at : at + 1] = [slice(None)] * rest
    shape: list[int] = []
    diagonal, dimension = triangle.diagonal, 0
    rows, columns = len(triangle.shape) - 2, len(triangle.shape) - 1
    for part in parts:
        if part is None:
            if dimension > rows:  # between rows and columns, or behind them
                return None
            shape.append(1)
            continue
        if isinstance(part, int):
            if dimension >= rows and not triangle.is_uniform:
                return None
        else:
            start, stop, step = part.indices(triangle.shape[dimension])
            if step != 1:
                return None
            shape.append(max(0, stop - start))
            diagonal += start if dimension == rows else -start if dimension == columns else 0
        dimension += 1
    return Triangle(tuple(shape), diagonal, triangle.below, triangle.above, triangle.dtype)


def _is_plain(part: Any) -> bool:
    if isinstance(part, slice):
        return all(end is None or type(end) is int for end in (part.start, part.stop, part.step))
    return type(part) is int


def _reshaped(triangle: Triangle, *sizes: Any) -> Triangle | None:
    """Only where rows and columns stay and unit dimensions come or go."""
    wanted = _sizes(sizes)
    if wanted is None or -1 in wanted or tuple(wanted[-2:]) != triangle.shape[-2:]:
        return None
    if math.prod(triangle.shape[:-2]) != 1 or math.prod(wanted[:-2]) != 1:
        return None
    return replace(triangle, shape=tuple(wanted))


def _expanded(triangle: Triangle, *sizes: Any) -> Triangle | None:
    wanted = _sizes(sizes)
    if wanted is None or len(wanted) < len(triangle.shape):
        return None
    own = (1,) * (len(wanted) - len(triangle.shape)) + triangle.shape
    full = tuple(have if want == -1 else want for want, have in zip(wanted, own, strict=True))
    if full[-2:] != own[-2:] or any(have not in (1, want) for want, have in zip(full, own, strict=True)):
        return None
    return replace(triangle, shape=full)


def _sizes(sizes: Sequence[Any]) -> list[int] | None:
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return list(sizes) if all(type(size) is int for size in sizes) else None


def _unsqueezed(triangle: Triangle, dim: int) -> Triangle | None:
    at = dim if dim >= 0 else dim + len(triangle.shape) + 1
    if at > len(triangle.shape) - 2:
        return None
    return replace(triangle, shape=(*triangle.shape[:at], 1, *triangle.shape[at:]))


def _same(triangle: Triangle) -> Triangle:
    return triangle


_VIEWS: dict[str, Callable[..., Triangle | None]] = {
    "tril": lambda triangle, diagonal=0: _cut(triangle, diagonal, lower=True),
    "triu": lambda triangle, diagonal=0: _cut(triangle, diagonal, lower=False),
    "__getitem__": _sliced,
    "view": _reshaped,
    "reshape": _reshaped,
    "expand": _expanded,
    "unsqueeze": _unsqueezed,
    "contiguous": _same,
    "detach": _same,
    "clone": _same,
}
# Each entry of the result depends on the same entry of the arguments: computed for the two values.
_ELEMENTWISE = {
    *("eq", "__eq__", "ne", "__ne__", "lt", "__lt__", "le", "__le__", "gt", "__gt__", "ge", "__ge__"),
    *("logical_not", "bitwise_not", "__invert__", "neg", "__neg__", "abs", "log"),
    *("logical_and", "bitwise_and", "__and__", "logical_or", "bitwise_or", "__or__"),
    *("add", "sub", "subtract", "rsub", "__rsub__", "mul", "multiply", "div", "divide", "true_divide"),
    *("bool", "float", "half", "bfloat16", "double", "int", "long", "to", "type"),
    *("masked_fill", "where"),
}


_results: dict[Any, Triangle] = {}  # every layer of a model asks for the same, in every step
_MOST_RESULTS = 1000


def _elementwise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Triangle | None:
    key = (name, torch.get_default_dtype(), *map(_key, args), *kwargs, *map(_key, kwargs.values()))
    result = _results.get(key)
    if result is None:
        result = _computed(name, args, kwargs)
        if result is not None and None not in key:
            if len(_results) >= _MOST_RESULTS:
                _results.clear()
            _results[key] = result
    return result


def _key(value: Any) -> Any:
    """What it does in a computation; None where that cannot be said. 0.0 is not -0.0, and 1 not True."""
    if isinstance(value, Triangle):
        return value.shape, value.diagonal, value.dtype, repr(value.below), repr(value.above)
    if isinstance(value, bool | int | float):
        return repr(value)
    return value if isinstance(value, torch.dtype) else None


def _computed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Triangle | None:
    given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Triangle)]
    cut = [triangle for triangle in given if not triangle.is_uniform]
    shapes = {triangle.shape for triangle in given if triangle.shape}
    if len({triangle.diagonal for triangle in cut}) > 1 or len(shapes) != 1:
        return None
    function = getattr(Tensor, name, None) if isinstance(args[0], Triangle) else None
    if name == "where":
        function = torch.where
    if function is None:
        return None
    # 0-dimensional arguments stay so: they do not take part in the choice of the dtype.
    real = [_operand(arg) for arg in args], {key: _operand(value) for key, value in kwargs.items()}
    try:
        pair = function(*real[0], **real[1])
    except (RuntimeError, TypeError):
        return None
    if not isinstance(pair, Tensor) or pair.shape != (2,) or pair.device.type != "cpu":
        return None
    model = (cut or given)[0]
    return replace(model, shape=shapes.pop()).with_pair(pair)


def _operand(value: Any) -> Any:
    if not isinstance(value, Triangle):
        return value
    return value.pair if value.shape else value.pair[0]
