"""Where a model computes attention in its own code."""

from __future__ import annotations

import dis
from types import FunctionType
from typing import Any

from torch import nn

from oomph.records import Allocation, Prediction

_SOFTMAX = ("aten._softmax", "aten._safe_softmax")
_PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm", "mm"}
_DEEP = 3  # calls of helpers that are looked into
# What these are made of is not the user's own code, or is fused already.
_LIBRARIES = ("torch.", "transformers.", "oomph.")


def attention_matrices(prediction: Prediction) -> dict[str, list[Allocation]]:
    """Module -> the softmax results [.., queries, keys] that it keeps for backward.

    A product of queries with keys of that shape precedes each, in the same module or its parent.
    """
    products: dict[str, set[tuple[int, ...]]] = {}
    found: dict[str, list[Allocation]] = {}
    for made in prediction.allocations:
        if made.stage != "forward activations" or len(made.shape) < 3:
            continue
        name = _name(made.op)
        if name in ("aten.bmm", "aten.baddbmm"):
            products.setdefault(made.module, set()).add(tuple(made.shape[-2:]))
        elif name in _SOFTMAX and made.saved:
            shape = tuple(made.shape[-2:])
            if any(shape in products.get(module, ()) for module in (made.module, _parent(made.module))):
                found.setdefault(made.module, []).append(made)
    return found


def drops_weights(prediction: Prediction, module: str) -> bool:
    """Does the module drop attention weights? Their dropout has the shape of a softmax result."""
    shapes = {made.shape for made in attention_matrices(prediction).get(module, [])}
    return any(
        _name(made.op) == "aten.native_dropout" and made.shape in shapes
        for made in prediction.allocations
        if made.module == module or _parent(made.module) == module
    )


def _name(op: str) -> str:
    """Without the overload."""
    return ".".join(op.split(".")[:2])


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def writes_attention_out(module: nn.Module) -> bool:
    """Does the module's own forward mention a softmax and a product? To be asked where nothing was run."""
    kind = type(module)
    if kind.__module__.startswith(_LIBRARIES) or kind.__module__ == "torch":
        return False
    names = _names_used(kind.forward, kind, _DEEP, set())
    return any("softmax" in name.lower() for name in names) and bool(names & _PRODUCTS)


def _names_used(function: Any, kind: type, deep: int, seen: set[Any]) -> set[str]:
    """Names in a function's code, and in that of the helpers and methods that it calls. `@` is "matmul"."""
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return set()
    seen.add(function.__code__)
    codes = [function.__code__, *(c for c in function.__code__.co_consts if hasattr(c, "co_names"))]
    names = {name for code in codes for name in code.co_names}
    if any(
        step.opname == "BINARY_OP" and step.argrepr == "@" for code in codes for step in dis.Bytecode(code)
    ):
        names.add("matmul")
    for name in tuple(names) if deep else ():
        helper = function.__globals__.get(name, getattr(kind, name, None))
        if getattr(helper, "__module__", None) == function.__module__:
            names |= _names_used(helper, kind, deep - 1, seen)
    return names
