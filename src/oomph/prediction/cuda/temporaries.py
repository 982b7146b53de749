"""Bytes that a CUDA kernel's host code allocates for itself, which no result shows.

A rule lists them in order. A positive number is an allocation, freed when the kernel returns unless a
negative number (the same size) frees it earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._ops import OpOverload

from oomph.gpus import GPU

Bound = dict[str, Any]  # an op's arguments by name, defaults filled in
Rule = Callable[[Bound, GPU], list[int]]
_RULES: dict[OpOverload, Rule] = {}

# The other way round: indices of results that the fake kernel makes, but that take no device memory on a GPU.
HOST_OUTPUTS: dict[OpOverload, Callable[[Sequence[Any], Mapping[str, Any]], frozenset[int]]] = {}


def temporaries(*ops: OpOverload) -> Callable[[Rule], Rule]:
    """Register the rule of one or more ops."""

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return register


def temporaries_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], gpu: GPU) -> list[int]:
    rule = _RULES.get(func)
    return [size for size in rule(bind(func, args, kwargs), gpu) if size] if rule is not None else []


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound:
    bound: Bound = {}
    for position, parameter in enumerate(op._schema.arguments):
        if position < len(args):
            bound[parameter.name] = args[position]
        else:
            bound[parameter.name] = kwargs.get(parameter.name, parameter.default_value)
    return bound
