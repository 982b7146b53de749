"""Per-token changes of a weight that are not computed: left diag(mod) right, and the weight plus that.

Legend: L the tokens' shape (batch, time, ...), o and i the two sizes of the weight, r the rank of its change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.fixes.deferral.deferred import Arguments, Deferred, Options
from oomph.ops.modulation import modulated_linear, weight_delta_norm

_RESHAPING = ("reshape", "view", "flatten")


@dataclass(frozen=True)
class Factors:
    """left diag(mod) right, times a number. A factor without tokens is the same for all of them."""

    lead: torch.Size  # L
    left: Tensor  # [o, r] or [*L, o, r]
    right: Tensor  # [r, i] or [*L, r, i]
    mod: Tensor | None = None  # [*L, r]
    scale: float = 1.0

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead, self.left.shape[-2], self.right.shape[-1]))

    @property
    def tensors(self) -> list[Tensor]:
        return [one for one in (self.left, self.right, self.mod) if one is not None]

    def transposed(self) -> Factors:
        return replace(self, left=self.right.mT, right=self.left.mT)

    def with_lead(self, lead: Sequence[int]) -> Factors:
        def moved(one: Tensor, own: int) -> Tensor:
            return one if one.dim() == own else one.reshape(*lead, *one.shape[one.dim() - own :])

        mod = None if self.mod is None else moved(self.mod, 1)
        return replace(
            self, lead=torch.Size(lead), left=moved(self.left, 2), right=moved(self.right, 2), mod=mod
        )

    def times(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """(weight + this) x for x [*L, i]: [*L, o], without what is in the brackets."""
        mod = self.mod if self.scale == 1 or self.mod is None else self.mod * self.scale
        if mod is not None and weight is not None and self.left.dim() == self.right.dim() == 2:
            return modulated_linear(x, weight.t(), self.right.t(), self.left.t(), mod)
        inner = _matrix_times(self.right, x)
        if mod is not None:
            inner = inner * mod
        elif self.scale != 1:
            inner = inner * self.scale
        change = _matrix_times(self.left, inner)
        return change if weight is None else F.linear(x, weight) + change

    def squared_norms(self) -> Tensor:
        """Of every token's matrix, [*L]: m^T ((left^T left) * (right right^T)) m."""
        if self.mod is not None and self.left.dim() == self.right.dim() == 2:
            return weight_delta_norm(self.left, self.right, self.mod, squared=True) * self.scale**2
        gram = (self.left.mT @ self.left) * (self.right @ self.right.mT)
        if self.mod is not None:
            gram = gram * (self.mod.unsqueeze(-1) * self.mod.unsqueeze(-2))
        return (gram.sum((-2, -1)) * self.scale**2).expand(self.lead)


def _matrix_times(matrix: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, matrix) if matrix.dim() == 2 else (matrix @ x.unsqueeze(-1)).squeeze(-1)


class Setting:
    """How torch is set: what is computed later is computed as it would have been."""

    def __init__(self, device: torch.device) -> None:
        self.kind = device.type
        self.now = self._now()

    def _now(self) -> tuple[bool, bool, torch.dtype]:
        on = torch.is_autocast_enabled(self.kind)
        return torch.is_grad_enabled(), on, torch.get_autocast_dtype(self.kind)

    @property
    def holds(self) -> bool:
        return self.now == self._now()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        if self.holds:
            yield
            return
        gradients, on, dtype = self.now
        with torch.set_grad_enabled(gradients), torch.autocast(self.kind, dtype, on):
            yield


class WeightDelta(Deferred):
    """A change of a weight per token, [*L, o, i]; with `weight`, the changed weights themselves."""

    def __init__(self, factors: Factors, make: Callable[[], Tensor], weight: Tensor | None = None) -> None:
        super().__init__()
        self.factors, self.weight, self._make = factors, weight, make
        self.shape = factors.shape
        self.dtype, self.device = factors.left.dtype, factors.left.device
        self.setting = Setting(self.device)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        given = [*self.factors.tensors, *([] if self.weight is None else [self.weight])]
        return self.setting.now[0] and any(one.requires_grad for one in given)

    def _compute(self) -> Tensor:
        with self.setting.again():
            return self._make()

    def follow(self, name: str, func: Any, args: Arguments, kwargs: Options) -> Any:
        name = _plain(name)
        if not self.setting.holds:
            return NotImplemented
        if name in ("matmul", "bmm", "einsum"):
            product = None if kwargs else _product(self, name, args)
            return NotImplemented if product is None else product
        if args[0] is self and name in _RESHAPING:
            return self._reshaped(func, args, kwargs)
        if args[0] is self and name in ("transpose", "mT") and _swaps_last(args[1:], kwargs, len(self.shape)):
            weight = None if self.weight is None else self.weight.t()
            other = WeightDelta(self.factors.transposed(), lambda: self.real().mT, weight)
            return self.add_view(other, lambda real: real.mT)
        if name == "add" and len(args) == 2 and not kwargs:
            return self._plus(func, args)
        if self.weight is not None or kwargs.get("out") is not None:
            return NotImplemented
        if name in ("mul", "div") and len(args) == 2 and not kwargs:
            return self._scaled(name, func, args)
        if (name == "square" or (name == "pow" and args[1:] == (2,))) and args[0] is self:
            return SquaredDelta(self, lambda: func(self.real(), *args[1:]))
        if name in ("norm", "linalg_norm") and args[0] is self:
            return self._norm(*args[1:], **kwargs)
        return NotImplemented

    def _reshaped(self, func: Any, args: Arguments, kwargs: Options) -> Any:
        """Other tokens' shapes; the matrices stay."""
        shape = func(torch.empty(self.shape, device="meta"), *args[1:], **kwargs).shape
        if len(shape) < 3 or shape[-2:] != self.shape[-2:]:
            return NotImplemented
        other = WeightDelta(
            self.factors.with_lead(shape[:-2]), lambda: self.real().reshape(shape), self.weight
        )
        return self.add_view(other, lambda real: func(real, *args[1:], **kwargs))

    def _plus(self, func: Any, args: Arguments) -> Any:
        weight = args[1] if args[0] is self else args[0]
        if self.weight is not None or not isinstance(weight, Tensor) or weight.dtype != self.dtype:
            return NotImplemented
        if weight.shape[-2:] != self.shape[-2:] or weight.numel() != self.shape[-2] * self.shape[-1]:
            return NotImplemented
        if weight.dim() > len(self.shape):
            return NotImplemented
        matrix = weight.reshape(self.shape[-2:])
        return WeightDelta(self.factors, lambda: func(*_real(args)), matrix)

    def _scaled(self, name: str, func: Any, args: Arguments) -> Any:
        number = args[1] if args[0] is self else args[0]
        if isinstance(number, bool) or not isinstance(number, int | float):
            return NotImplemented
        if name == "div" and (args[0] is not self or number == 0):
            return NotImplemented
        scale = self.factors.scale * (number if name == "mul" else 1 / number)
        return WeightDelta(replace(self.factors, scale=scale), lambda: func(*_real(args)))

    def _norm(self, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        if p not in ("fro", None, 2) or keepdim or dtype is not None:
            return NotImplemented
        if dim is not None and not _is_last_two(dim, len(self.shape)):
            return NotImplemented
        if dim is None and p == 2 and len(self.shape) == 2:
            return NotImplemented
        squares = self.factors.squared_norms()
        return (squares.sum() if dim is None else squares).sqrt().to(self.dtype)


class SquaredDelta(Deferred):
    """The squares of a delta's numbers, of which a sum or a mean will be asked."""

    def __init__(self, delta: WeightDelta, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.delta, self._make = delta, make
        self.shape, self.dtype, self.device = delta.shape, delta.dtype, delta.device

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self.delta.requires_grad

    def _compute(self) -> Tensor:
        with self.delta.setting.again():
            return self._make()

    def follow(self, name: str, func: Any, args: Arguments, kwargs: Options) -> Any:
        if name not in ("sum", "mean") or args[0] is not self or not self.delta.setting.holds:
            return NotImplemented
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if len(args) > 2 or kwargs.keys() - {"dim"}:
            return NotImplemented
        if dim is not None and not _is_last_two(dim, len(self.shape)):
            return NotImplemented
        squares = self.delta.factors.squared_norms()
        total = squares.sum() if dim is None else squares
        parts = self.shape.numel() if dim is None else self.shape[-2] * self.shape[-1]
        return (total / parts if name == "mean" else total).to(self.dtype)


def _product(weights: WeightDelta, name: str, args: Arguments) -> Tensor | None:
    """A vector per token times its matrix, however it is written."""
    if name == "einsum":
        return _einsum_product(weights, args)
    if len(args) != 2 or not all(isinstance(one, Tensor | WeightDelta) for one in args):
        return None
    first, second = args
    lead, (rows, columns) = weights.shape[:-2], weights.shape[-2:]
    if first is weights and second is not weights and second.shape == (*lead, columns, 1):
        made = _times(weights.factors, weights.weight, second.squeeze(-1))
        return None if made is None else made.unsqueeze(-1)
    if second is weights and first is not weights and first.shape == (*lead, 1, rows):
        made = _times_turned(weights, first.squeeze(-2))
        return None if made is None else made.unsqueeze(-2)
    return None


def _einsum_product(weights: WeightDelta, args: Arguments) -> Tensor | None:
    equation, *given = args
    operands = as_operands(given)
    if len(operands) != 2 or not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    left, out = equation.replace(" ", "").split("->")
    words = left.split(",")
    if len(words) != 2 or (operands[0] is weights) == (operands[1] is weights):
        return None
    of_weights, of_x = words if operands[0] is weights else reversed(words)
    x = operands[1] if operands[0] is weights else operands[0]
    if not isinstance(x, Tensor) or len(of_weights) != len(weights.shape) or len(of_x) != x.dim():
        return None
    if len(set(of_weights)) != len(of_weights):
        return None
    lead, row, column = of_weights[:-2], of_weights[-2], of_weights[-1]
    if of_x == lead + column and out == lead + row:
        return _times(weights.factors, weights.weight, x)
    if of_x == lead + row and out == lead + column:
        return _times_turned(weights, x)
    return None


def _times_turned(weights: WeightDelta, x: Tensor) -> Tensor | None:
    weight = None if weights.weight is None else weights.weight.t()
    return _times(weights.factors.transposed(), weight, x)


def _times(factors: Factors, weight: Tensor | None, x: Tensor) -> Tensor | None:
    given = [*factors.tensors, x, *([] if weight is None else [weight])]
    if len({(one.dtype, one.device) for one in given}) > 1 or x.shape[:-1] != factors.lead:
        return None
    return factors.times(x, weight)


def as_operands(given: Sequence[Any]) -> Sequence[Any]:
    """Of einsum, which takes them one by one or as one list."""
    return given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given


def _plain(name: str) -> str:
    known = {"__add__": "add", "__radd__": "add", "__mul__": "mul", "__rmul__": "mul", "multiply": "mul"}
    known |= {"__truediv__": "div", "true_divide": "div", "__matmul__": "matmul", "__pow__": "pow"}
    return known.get(name, name)


def _real(args: Arguments) -> list[Any]:
    return [one.real() if isinstance(one, Deferred) else one for one in args]


def _is_last_two(dim: Any, places: int) -> bool:
    dims = tuple(dim) if isinstance(dim, Sequence) else (dim,)
    return sorted(one % places for one in dims) == [places - 2, places - 1]


def _swaps_last(dims: Arguments, kwargs: Options, places: int) -> bool:
    given = tuple(dims) or (kwargs.get("dim0", -1), kwargs.get("dim1", -2))
    return _is_last_two(given, places)
