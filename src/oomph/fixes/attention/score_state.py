"""What is known of a score matrix that has not been computed, and the attention it turns into.

T queries, S keys; `lead` are the dimensions before them. Scores are
scale * q k^T + sum of terms, where not masked; weights are their softmax over the keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.errors import UserError
from oomph.fixes.attention.triangles import Triangle

# exp of this is 0 in every dtype, as long as scores lie within ten thousand of each other.
NEVER = -1e4

# Tuples, since several are made in every layer and step: a frozen dataclass takes several times as long to
# make, or to copy with a change.


class Context(NamedTuple):
    """How torch was set when a call was made."""

    gradients: bool
    autocast: torch.dtype | None  # None: off

    @classmethod
    def now(cls, device: torch.device) -> Context:
        on = torch.is_autocast_enabled(device.type)
        return cls(torch.is_grad_enabled(), torch.get_autocast_dtype(device.type) if on else None)

    def matmul_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.autocast is None or dtype == torch.float64 else self.autocast


class Constant(NamedTuple):
    """A mask in the arguments of a recorded call, which is made when the call is."""

    triangle: Triangle
    device: torch.device


class Call(NamedTuple):
    """One call of the program, to be made after all if need be."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Before:
    """In the arguments of a Call: what the calls before it gave."""


BEFORE = Before()


class Term(NamedTuple):
    """Added to the scores, times its factor."""

    value: Tensor
    factor: float


class Fill(NamedTuple):
    """Where `mask` holds (`inverted`: does not hold), the score is `value`."""

    mask: Tensor
    value: float
    inverted: bool

    def forbidden(self) -> Tensor:
        return ~self.mask if self.inverted else self.mask


class State(NamedTuple):
    q: Tensor  # [*, T, D]
    k: Tensor  # [*, S, D]
    shape: torch.Size  # [*lead, T, S]
    dtype: torch.dtype
    context: Context
    calls: tuple[Call, ...]
    held: tuple[tuple[Tensor, int], ...]  # tensors that the calls read, and their versions
    scale: float = 1.0
    terms: tuple[Term, ...] = ()
    fills: tuple[Fill, ...] = ()
    future: float | None = None  # what keys after the query's own position are filled with
    future_is_added: bool = False
    fills_before_future: int = 0
    terms_after_fills: bool = False
    is_weights: bool = False
    empty_rows_are_zero: bool = False  # where all keys are masked, weights were set to 0

    @property
    def lead(self) -> tuple[int, ...]:
        return tuple(self.shape[:-2])

    @property
    def requires_grad(self) -> bool:
        tensors = [self.q, self.k, *(term.value for term in self.terms)]
        return self.context.gradients and any(tensor.requires_grad for tensor in tensors)

    def then(self, call: Call, **changed: Any) -> State:
        """After one more call."""
        given = (*call.args, *call.kwargs.values()) if call.kwargs else call.args
        read = [(arg, version(arg)) for arg in given if isinstance(arg, Tensor)]
        held = (*self.held, *read) if read else self.held
        return self._replace(calls=(*self.calls, call), held=held, **changed)

    def scaled(self, call: Call, factor: float) -> State | None:
        if (self.fills or self.future is not None) and not factor > 0:
            return None
        terms = tuple(term._replace(factor=term.factor * factor) for term in self.terms)
        fills = tuple(fill._replace(value=fill.value * factor) for fill in self.fills)
        future = None if self.future is None else self.future * factor
        if any(value > NEVER for value in [*(fill.value for fill in fills), *([future] if future else [])]):
            return None
        return self.then(call, scale=self.scale * factor, terms=terms, fills=fills, future=future)

    def check_unchanged(self) -> None:
        if any(version(tensor) != then for tensor, then in self.held):
            raise UserError(
                "attention scores are asked for after a tensor they are made of was changed in place; "
                "leave fix 'fused_attention' out of this module"
            )

    def computed(self) -> Tensor:
        """The program's own calls, made now."""
        self.check_unchanged()
        value: Any = None
        with torch.set_grad_enabled(self.context.gradients), self._autocast():
            for call in self.calls:
                value = call.func(*(_made(arg, value) for arg in call.args), **dict(call.kwargs))
        return value

    def _autocast(self) -> Any:
        kind, wanted = self.q.device.type, self.context.autocast
        if Context.now(self.q.device).autocast == wanted:
            return contextlib.nullcontext()
        return torch.autocast(kind, wanted or torch.get_autocast_dtype(kind), enabled=wanted is not None)


def version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _made(arg: Any, before: Any) -> Any:
    if arg is BEFORE:
        return before
    return arg.triangle.tensor(arg.device) if isinstance(arg, Constant) else arg
