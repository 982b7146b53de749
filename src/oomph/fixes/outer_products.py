"""Runs a module's forward so that outer products, of which weight deltas are made, are deferred."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from oomph.fixes.deferral.deferred import (
    MAY_CHANGE,
    Deferred,
    Options,
    changes_in_place,
)
from oomph.fixes.deferral.mode import CallsMode
from oomph.fixes.deferral.mode_stack import is_in_force
from oomph.fixes.deferral.quiet_calls import QuietCalls, kind_of
from oomph.fixes.weight_deltas import Factors, WeightDelta, as_operands

_SMALLER = 4  # times smaller than the matrices must be the rank for which it is worth it
_BROADCASTING = {"mul", "__mul__", "__rmul__", "multiply"}
_MATRIX_PRODUCTS = {"matmul", "bmm", "__matmul__"}
_LOOKED_AT = {*_BROADCASTING, *_MATRIX_PRODUCTS, "einsum", *MAY_CHANGE}


class DeltaMode(CallsMode):
    looked_at = frozenset(_LOOKED_AT)

    def __init__(self) -> None:
        super().__init__()
        self.deferred_something = False
        self._deltas: list[weakref.ref[WeightDelta]] = []

    def handled(self, name: str, func: Any, args: Sequence[Any], kwargs: Options) -> Any:
        if changes_in_place(name, args, kwargs):
            self._before_change([*args[:1], kwargs.get("out")])
        factors = None if kwargs else outer_product(name, args)
        if factors is None:
            return func(*args, **kwargs)
        delta = WeightDelta(factors, lambda: func(*args))
        self.deferred_something = True
        self._deltas.append(weakref.ref(delta))
        return delta

    def _before_change(self, written: Sequence[Any]) -> None:
        """What was to be made of tensors that are changed now is made first."""
        waiting = [delta for one in self._deltas if (delta := one()) is not None and not delta.is_real]
        self._deltas = [weakref.ref(delta) for delta in waiting]
        if not waiting:
            return
        storages = {one.untyped_storage()._cdata for one in written if isinstance(one, Tensor)}
        for delta in waiting:
            held = {one.untyped_storage()._cdata for one in delta.factors.tensors}
            if not delta.is_real and held & storages:
                delta.real()


def without_deltas(forward: Callable[..., Any], *args: Any, quiet: QuietCalls, **kwargs: Any) -> Any:
    """The module's own forward; what it returns has been computed."""
    if is_in_force(DeltaMode):
        return forward(*args, **kwargs)
    kind = kind_of(forward, args, kwargs)
    if kind in quiet:
        return forward(*args, **kwargs)
    with DeltaMode() as mode:
        result = forward(*args, **kwargs)
    if not mode.deferred_something:
        quiet.add(kind)
    return tree_map_only(Deferred, lambda deferred: deferred.real(), result)


def outer_product(name: str, args: Sequence[Any]) -> Factors | None:
    """The factors of a call that makes a matrix of low rank for every token."""
    factors = None
    if name == "einsum":
        factors = _of_letters(*args)
    elif len(args) == 2 and all(isinstance(one, Tensor) and one.dim() >= 3 for one in args):
        if name in _BROADCASTING:
            factors = _of_broadcast(*args) or _of_broadcast(args[1], args[0])
        elif name in _MATRIX_PRODUCTS:
            factors = _of_matrices(*args)
    if factors is None or len({(one.dtype, one.device) for one in factors.tensors}) > 1:
        return None
    rank, sizes = factors.left.shape[-1], factors.shape[-2:]
    worth_it = min(sizes) >= _SMALLER * rank and 0 not in factors.shape and rank > 0
    return factors if worth_it and factors.left.is_floating_point() else None


def _of_broadcast(left: Tensor, right: Tensor) -> Factors | None:
    """u[..., None] * v[..., None, :]"""
    if left.dim() != right.dim() or left.shape[-1] != 1 or right.shape[-2] != 1:
        return None
    if left.shape[:-2] != right.shape[:-2]:
        return None
    return Factors(left.shape[:-2], left, right)


def _of_matrices(left: Tensor, right: Tensor) -> Factors | None:
    if left.shape[:-2] != right.shape[:-2] or left.shape[-1] != right.shape[-2]:
        return None
    return Factors(left.shape[:-2], left, right)


def _of_letters(equation: Any = None, *given: Any) -> Factors | None:
    """Such as bto,bti->btoi, or bsr,dr,rf->bsdf: two factors, and a number per token and rank."""
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    operands = as_operands(given)
    if not all(isinstance(one, Tensor) for one in operands):
        return None
    left_side, out = equation.replace(" ", "").split("->")
    words = left_side.split(",")
    if len(words) != len(operands) or len(words) not in (2, 3) or len(out) < 3:
        return None
    if any(len(set(word)) != len(word) for word in (*words, out)):
        return None
    sizes: dict[str, int] = {}
    for word, operand in zip(words, operands, strict=True):
        if len(word) != operand.dim():
            return None
        if any(
            sizes.setdefault(letter, size) != size for letter, size in zip(word, operand.shape, strict=True)
        ):
            return None
    lead, row, column = out[:-2], out[-2], out[-1]
    summed = {letter for word in words for letter in word} - set(out)
    if len(summed) > 1 or not set(out) <= sizes.keys():
        return None
    rank = summed.pop() if summed else ""
    found: dict[str, Tensor] = {}
    for word, operand in zip(words, operands, strict=True):
        role, wanted = _role(word, lead, row, column, rank)
        if role is None or role in found:
            return None
        found[role] = operand.permute([word.index(letter) for letter in wanted])
    if found.keys() not in ({"left", "right"}, {"left", "right", "mod"}):
        return None
    left, right = found["left"], found["right"]
    if not rank:
        left, right = left.unsqueeze(-1), right.unsqueeze(-2)
    if left.dim() == right.dim() == 2 and "mod" not in found:
        return None  # one matrix for all tokens
    return Factors(torch.Size(sizes[letter] for letter in lead), left, right, found.get("mod"))


def _role(word: str, lead: str, row: str, column: str, rank: str) -> tuple[str | None, str]:
    """Which factor it is, and the order in which its letters are wanted."""
    own = set(word) - set(lead)
    tokens = lead if set(lead) <= set(word) else ""
    if not tokens and set(lead) & set(word):
        return None, ""
    if own == {row, *rank}:
        return "left", tokens + row + rank
    if own == {column, *rank}:
        return "right", tokens + rank + column
    if rank and own == {rank} and tokens:
        return "mod", tokens + rank
    return None, ""
