"""Products of queries with keys, and of weights with values, in the ways that programs write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from oomph.fixes.deferral.deferred import Arguments, Options

_ORDINARY = (Tensor, FakeTensor)  # not parameters: a product with one is a layer


class Product(NamedTuple):
    q: Tensor  # [*, T, D]
    k: Tensor  # [*, S, D]
    scale: float = 1.0
    added: tuple[Tensor, float] | None = None


def as_product(name: str, args: Arguments, kwargs: Options) -> Product | None:
    """q k^T of a call that multiplies two batches of matrices; views, nothing is copied."""
    if name in ("matmul", "bmm", "__matmul__") and len(args) == 2 and not kwargs:
        return _of_matrices(*args)
    if name == "baddbmm" and len(args) == 3 and kwargs.keys() <= {"beta", "alpha"}:
        return _with_addend(*args, **kwargs)
    two = _of_einsum(args, kwargs) if name == "einsum" else None
    return None if two is None else _of_letters(*two)


def _of_einsum(args: Arguments, kwargs: Options) -> tuple[str, Any, Any] | None:
    """(equation, two operands), which may be given in a list."""
    if kwargs or len(args) < 2 or not isinstance(args[0], str):
        return None
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    return (args[0], *operands) if len(operands) == 2 else None


def _is_batch(*tensors: Any) -> bool:
    return all(
        type(tensor) in _ORDINARY
        and tensor.dim() >= 3
        and tensor.is_floating_point()
        and 0 not in tensor.shape
        and tensor.layout is torch.strided
        for tensor in tensors
    )


def _of_matrices(q: Any, k_transposed: Any) -> Product | None:
    if not _is_batch(q, k_transposed) or q.dim() != k_transposed.dim():
        return None
    if q.shape[-1] != k_transposed.shape[-2] or q.device != k_transposed.device:
        return None
    return Product(q, k_transposed.transpose(-2, -1))


def _with_addend(addend: Any, q: Any, k_transposed: Any, beta: Any = 1, alpha: Any = 1) -> Product | None:
    product = _of_matrices(q, k_transposed)
    if product is None or not isinstance(addend, Tensor) or not addend.is_floating_point():
        return None
    if addend.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
        return None
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in (beta, alpha)):
        return None
    full = (q.shape[0], q.shape[1], k_transposed.shape[2])
    if addend.dim() != 3 or any(a not in (1, f) for a, f in zip(addend.shape, full, strict=True)):
        return None
    return product._replace(scale=float(alpha), added=None if beta == 0 else (addend, float(beta)))


class _Letters(NamedTuple):
    first: str
    second: str
    out: str


def _letters(equation: str) -> _Letters | None:
    equation = equation.replace(" ", "")
    left, arrow, out = equation.partition("->")
    names = left.split(",")
    if not arrow or len(names) != 2 or "." in equation:
        return None
    if any(len(set(word)) != len(word) for word in (*names, out)):
        return None
    return _Letters(names[0], names[1], out)


def _of_letters(equation: str, q: Any, k: Any) -> Product | None:
    """One letter summed over; the last two of the result one of q and one of k; the rest in both."""
    words = _letters(equation)
    if words is None or not _is_batch(q, k) or q.device != k.device:
        return None
    if len(words.first) != q.dim() or len(words.second) != k.dim() or len(words.out) < 3:
        return None
    *lead, row, column = list(words.out)
    summed = [letter for letter in words.first if letter in words.second and letter not in words.out]
    if row not in words.first or row in words.second or column not in words.second or column in words.first:
        return None
    batch = "".join(lead)
    if len(summed) != 1 or any(
        set(word) != {*batch, own, *summed} for word, own in zip(words[:2], (row, column), strict=True)
    ):
        return None
    sizes = dict(zip(words.first, q.shape, strict=True))
    if any(sizes.get(letter, size) != size for letter, size in zip(words.second, k.shape, strict=True)):
        return None
    return Product(
        _ordered(q, words.first, batch + row + summed[0]),
        _ordered(k, words.second, batch + column + summed[0]),
    )


def einsum_product(
    args: Arguments, kwargs: Options, weights: Any
) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """For einsum(equation, weights, v): v as [*lead, S, E], and what makes its result of [*lead, T, E]."""
    two = _of_einsum(args, kwargs)
    if two is None or two[1] is not weights:
        return None
    words, v = _letters(two[0]), two[2]
    if words is None or not isinstance(v, Tensor) or len(words.second) != v.dim():
        return None
    if len(words.first) != weights.dim():
        return None
    *lead, row, summed = list(words.first)
    own = [letter for letter in words.second if letter not in words.first]
    if len(own) != 1 or summed in words.out or set(words.second) != {*lead, summed, *own}:
        return None
    if set(words.out) != {*lead, row, *own}:
        return None
    sizes = dict(zip(words.first, weights.shape, strict=True))
    if any(sizes.get(letter, size) != size for letter, size in zip(words.second, v.shape, strict=True)):
        return None
    batch = "".join(lead)
    made = batch + row + own[0]
    return _ordered(v, words.second, batch + summed + own[0]), lambda out: _ordered(out, made, words.out)


def _ordered(tensor: Tensor, letters: str, wanted: str) -> Tensor:
    return tensor if letters == wanted else tensor.permute([letters.index(letter) for letter in wanted])
