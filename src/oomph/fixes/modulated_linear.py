"""Weights that differ per token by a low-rank delta, applied without making the deltas.

Inside the chosen modules, an einsum that makes a matrix of low rank for every token, such as
`einsum("bsr,dr,rf->bsdf", mod, A, B)` or `einsum("bso,bsi->bsoi", u, v)`, returns a LazyTensor.
`LowRankDelta` follows scaling, the sum with a weight, the product with a vector per token, and norms.

Shapes: L the tokens' shape (batch, time, ...), o and i the two sizes of the weight, r the rank of its delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.fixes.lazy_tensor import (
    Args,
    Expression,
    Kwargs,
    LazyMode,
    LazyModeFix,
    RecordedCall,
    einsum_operands,
    lazy_tensor,
)
from oomph.fixes.registry import FixContext, Target
from oomph.ops.modulation import modulated_linear, weight_delta_norm

# Of the matrices' sizes to the rank: below it, the delta is not much larger than its factors.
_LEAST_RATIO = 4


class DeltaMode(LazyMode):
    functions = frozenset(("einsum",))

    def handle(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        factors = _low_rank_factors(args, kwargs)
        if factors is None:
            return func(*args, **kwargs)
        return lazy_tensor(LowRankDelta(*factors, RecordedCall(func, tuple(args))))


def _low_rank_factors(args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor, Tensor | None, torch.Size] | None:
    """left, right, mod and L of an einsum that makes left diag(mod) right for every token."""
    found = einsum_operands(args, kwargs)
    if found is None or len(found[2]) not in (2, 3) or len(found[1]) < 3:
        return None
    words, out, operands = found
    lead, row, column = out[:-2], out[-2], out[-1]
    summed = {subscript for word in words for subscript in word} - set(out)
    if len(summed) > 1 or not all(isinstance(one, Tensor) and one.is_floating_point() for one in operands):
        return None
    rank = "".join(summed)
    roles: dict[str, Tensor] = {}
    for word, operand in zip(words, operands, strict=True):
        own = set(word) - set(lead)
        tokens = lead if set(lead) <= set(word) else ""
        if not tokens and set(lead) & set(word):
            return None
        if own == {row, *rank}:
            role, wanted = "left", tokens + row + rank
        elif own == {column, *rank}:
            role, wanted = "right", tokens + rank + column
        elif rank and own == {rank} and tokens:
            role, wanted = "mod", tokens + rank
        else:
            return None
        roles[role] = operand.permute([word.index(subscript) for subscript in wanted])
    if len(roles) != len(words) or not {"left", "right"} <= roles.keys():
        return None
    left, right, mod = roles["left"], roles["right"], roles.get("mod")
    if not rank:
        left, right = left.unsqueeze(-1), right.unsqueeze(-2)
    if left.dim() == right.dim() == 2 and mod is None:
        return None  # one matrix for all tokens
    sizes = {
        s: n for word, one in zip(words, operands, strict=True) for s, n in zip(word, one.shape, strict=True)
    }
    shape = torch.Size(sizes[subscript] for subscript in out)
    worth_it = min(shape[-2:]) >= _LEAST_RATIO * left.shape[-1] > 0 and 0 not in shape
    same = len({(one.dtype, one.device) for one in operands}) == 1
    return (left, right, mod, shape[:-2]) if worth_it and same else None


class LowRankDelta(Expression):
    """weight + scale * left diag(mod) right for every token, [*L, o, i].

    left [o, r] or [*L, o, r]; right [r, i] or [*L, r, i]; mod [*L, r] or None; weight [o, i] or None.
    `squared`: the squares of its entries.
    """

    subject = "a weight per token from fix 'modulated_linear'"

    def __init__(
        self, left: Tensor, right: Tensor, mod: Tensor | None, lead: torch.Size, call: RecordedCall
    ) -> None:
        self.left, self.right, self.mod = left, right, mod
        self.weight: Tensor | None = None
        self.scale, self.squared = 1.0, False
        self.shape, self.dtype = torch.Size((*lead, left.shape[-2], right.shape[-1])), left.dtype
        self.record(call)

    def handle_function(self, name: str, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if not self.has_current_settings():
            return NotImplemented
        options = dict(kwargs)
        result: Any = None
        if self.squared:
            if name in ("sum", "mean") and args[0] is self:
                result = self._norm(*args[1:], squared=True, mean=name == "mean", **options)
        elif name == "einsum":
            result = self._product(args, kwargs)
        elif name == "add" and len(args) == 2 and not kwargs:
            changes = self._plus(args[1] if args[0] is self else args[0])
            result = changes and self.then(RecordedCall(func, tuple(args)), **changes)
        elif self.weight is not None:
            return NotImplemented
        elif name in ("mul", "div") and len(args) == 2 and not kwargs:
            changes = self._times_number(name, *args)
            result = changes and self.then(RecordedCall(func, tuple(args)), **changes)
        elif args[0] is self and (name == "square" or (name == "pow" and tuple(args[1:]) == (2,))):
            result = self.then(RecordedCall(func, tuple(args)), squared=True)
        elif args[0] is self and name in ("norm", "linalg_norm"):
            p = args[1] if len(args) > 1 else options.pop("p", options.pop("ord", None))
            if p in ("fro", None, 2):
                result = self._norm(*args[2:], **options)
        return NotImplemented if result is None else result

    def _plus(self, weight: Any) -> dict[str, Any] | None:
        sizes = self.shape[-2:]
        if self.weight is not None or not isinstance(weight, Tensor) or weight.dtype != self.dtype:
            return None
        if weight.shape[-2:] != sizes or weight.numel() != sizes.numel() or weight.dim() > len(self.shape):
            return None
        return {"weight": weight.reshape(sizes)}

    def _times_number(self, name: str, first: Any, second: Any) -> dict[str, Any] | None:
        number = second if first is self else first
        if isinstance(number, bool) or not isinstance(number, int | float):
            return None
        if name == "div" and (first is not self or number == 0):
            return None
        return {"scale": self.scale * number if name == "mul" else self.scale / number}

    def _product(self, args: Args, kwargs: Kwargs) -> Tensor | None:
        """A vector per token times its matrix, either way round."""
        found = einsum_operands(args, kwargs)
        if found is None or len(found[2]) != 2 or found[2][0] is found[2][1]:
            return None
        words, out, operands = found
        own = 0 if operands[0] is self else 1
        of_weights, of_x, x = words[own], words[1 - own], operands[1 - own]
        lead, row, column = of_weights[:-2], of_weights[-2], of_weights[-1]
        left, right, weight = self.left, self.right, self.weight
        if of_x == lead + row and out == lead + column:
            left, right = right.mT, left.mT
            weight = None if weight is None else weight.t()
        elif of_x != lead + column or out != lead + row:
            return None
        given = [one for one in (left, right, self.mod, weight, x) if one is not None]
        if not isinstance(x, Tensor) or len({(one.dtype, one.device) for one in given}) > 1:
            return None
        self.check_unchanged()
        mod = self.mod if self.mod is None or self.scale == 1 else self.mod * self.scale
        if mod is not None and weight is not None and left.dim() == right.dim() == 2:
            return modulated_linear(x, weight.t(), right.t(), left.t(), mod)
        inner = _matrix_times(right, x)
        if mod is not None:
            inner = inner * mod
        elif self.scale != 1:
            inner = inner * self.scale
        change = _matrix_times(left, inner)
        return change if weight is None else F.linear(x, weight) + change

    def _norm(
        self,
        dim: Any = None,
        keepdim: bool = False,
        dtype: Any = None,
        squared: bool = False,
        mean: bool = False,
    ) -> Tensor | None:
        """Of every token's matrix, or of all: m^T ((left^T left) * (right right^T)) m for mod m."""
        n = len(self.shape)
        if dim is not None:
            dims = dim if isinstance(dim, Sequence) else (dim,)
            if sorted(one % n for one in dims) != [n - 2, n - 1]:
                return None
        if keepdim or dtype is not None:
            return None
        if self.mod is not None and self.left.dim() == self.right.dim() == 2:
            squares = weight_delta_norm(self.left, self.right, self.mod, squared=True) * self.scale**2
        else:
            gram = (self.left.mT @ self.left) * (self.right @ self.right.mT)
            if self.mod is not None:
                gram = gram * (self.mod.unsqueeze(-1) * self.mod.unsqueeze(-2))
            squares = (gram.sum((-2, -1)) * self.scale**2).expand(self.shape[:-2])
        total = squares.sum() if dim is None else squares
        if mean:
            total = total / (self.shape.numel() if dim is None else self.shape[-2:].numel())
        return (total if squared else total.sqrt()).to(self.dtype)


def _matrix_times(matrix: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, matrix) if matrix.dim() == 2 else (matrix @ x.unsqueeze(-1)).squeeze(-1)


DeltaMode.expressions = (LowRankDelta,)


class ModulatedLinear(LazyModeFix):
    name = "modulated_linear"
    kind = "exact"
    changes = "Weights that differ per token by a low-rank delta are applied without making the deltas."
    mode = DeltaMode
    effect = "makes no weight per token"

    def targets(self, context: FixContext) -> Iterable[Target]:
        """Modules that make, at the peak, a tensor of many matrices of a weight's shape."""
        weights = {
            tuple(one.shape)
            for module in context.model.modules()
            if not isinstance(module, nn.Embedding)
            for one in module.parameters(recurse=False)
            if one.dim() == 2
        }
        weights |= {shape[::-1] for shape in weights}
        made_in = {
            alive.allocation.module
            for alive in context.prediction.at_peak
            if len(alive.allocation.shape) > 2
            and alive.allocation.kind in ("activation", "temporary")
            and tuple(alive.allocation.shape[-2:]) in weights
            and min(alive.allocation.shape[-2:]) > 1
        }
        if made_in and not self.is_applied(context.model):
            yield Target(tuple(sorted(made_in)))
