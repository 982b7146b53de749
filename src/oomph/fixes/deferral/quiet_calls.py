"""Calls of a module in which a mode had nothing to do: the next ones like them can do without it.

A mode is asked about every call into torch, and each answer takes as long as the launch of a kernel. Where it
changed nothing, the program ran as it is written, and so it does without the mode. What a program starts to
do later, in calls that look the same, is missed: then nothing is saved, and the result is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from oomph.fixes.journal import WrappedForward

_MOST = 1000  # kinds that are remembered; where every call is of another, remembering is of no use
_CONTAINERS = (list, tuple, dict)


class QuietCalls:
    """Of one module."""

    def __init__(self) -> None:
        self._kinds: set[Hashable] = set()

    def __contains__(self, kind: Hashable | None) -> bool:
        return kind in self._kinds

    def add(self, kind: Hashable | None) -> None:
        """`kind`: as kind_of gave it; None is not remembered."""
        if kind is None:
            return
        if len(self._kinds) >= _MOST:
            self._kinds.clear()
        self._kinds.add(kind)


def kind_of(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """What a module's call looks like from outside; None where an argument cannot be told from another."""
    if torch.compiler.is_compiling():  # sizes may be symbols there
        return None
    while isinstance(forward, WrappedForward):
        forward = forward.inner
    training = getattr(getattr(forward, "__self__", None), "training", None)
    kinds: list[Any] = [training, torch.is_grad_enabled(), *kwargs]
    # Autocast decides the dtype of what is computed.
    kinds += [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
    with torch._C.DisableTorchFunction():  # other modes need not be asked for a shape
        for value in (*args, *kwargs.values()) if kwargs else args:
            for leaf in tree_leaves(value) if isinstance(value, _CONTAINERS) else (value,):
                if isinstance(leaf, Tensor):
                    if leaf.layout is not torch.strided:
                        return None
                    kinds += [leaf.shape, 0 in leaf.stride(), leaf.dtype, leaf.requires_grad]
                elif leaf is None or isinstance(leaf, bool | int | float | str):
                    kinds.append(leaf)
                else:
                    return None
    return tuple(kinds)
