"""Gradients that autograd writes into tensors it already holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oomph.prediction.ops.registry import OpFacts
from oomph.prediction.tracer.fast_path import is_dense
from oomph.prediction.tracer.tracer import Tracer
from oomph.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    current_autograd_node,
    disable_torch_function,
    storage_id,
    storage_use_count,
    tensor_use_count,
)

aten = torch.ops.aten
_ZEROS = {"aten.new_zeros", "aten.zeros", "aten.zeros_like"}


class GradientReuse:
    """Where autograd writes into a tensor that it already holds, rather than making a new one.

    It does so for plain tensors and never for tensor subclasses such as our fakes: their sums and scatters
    arrive as ordinary ops, each with a result of its own. Whether a real tensor would have been reused
    follows from its reference counts, compared with those of a tensor that autograd alone holds.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._sole_owner_counts = _uses_of_gradient or count_uses_of_gradient()

    def writes_into_first(self, facts: OpFacts, args: Sequence[Any]) -> bool:
        """Whether autograd would write the op's result into its first argument."""
        if "fresh zeros" in facts.reuses_first:
            allocation = self._tracer.recorder.allocation_of(args[0])
            return allocation is not None and allocation.op in _ZEROS
        if "sum of gradients" in facts.reuses_first:
            return self._is_sum_of_gradients(*args[:2])
        node = current_autograd_node()
        made_here = node is not None and node.name() in facts.reuses_first
        return made_here and self._tracer.made_by_running_node(args[0])

    def _is_sum_of_gradients(self, first: Any, second: Any) -> bool:
        """A tensor used twice gets two gradients; the second is added to the first if autograd owns it.

        Not while backward makes a graph of its own (input_buffer.cpp)."""
        if torch.is_grad_enabled() or not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        if not is_dense(first.shape, first.stride()) or _use_counts(first) != self._sole_owner_counts:
            return False
        return not self._tracer.made_by_running_node(first) or _has_repeated_edge(current_autograd_node())


def _has_repeated_edge(node: Any) -> bool:
    """Whether a node has two gradients for one input of another, as x * x has. A sum of two tensors that any
    other node has just made is a part of its formula."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


def _use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor_use_count(tensor), storage_use_count(storage_id(tensor.untyped_storage()))


_uses_of_gradient: tuple[int, int] | None = None


def remember_uses_of_gradient(counts: tuple[int, int]) -> None:
    """What `count_uses_of_gradient` has found, here or in a fork of this process."""
    global _uses_of_gradient
    _uses_of_gradient = counts


def count_uses_of_gradient() -> tuple[int, int]:
    """Of a tensor that autograd alone holds. The dispatch path adds some, in each torch release others."""
    found: list[tuple[int, int]] = []
    mode = FakeTensorMode()

    class RecordUseCounts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor and current_autograd_node() is not None:
                found.append(_use_counts(args[0]))
            return mode.__torch_dispatch__(func, types, args, kwargs or {})

    with torch.inference_mode(False), torch.enable_grad(), disable_torch_function(), RecordUseCounts():
        leaf = torch.ones(2, requires_grad=True)
        twice = leaf * 2
        (twice * 2 + twice * 2).sum().backward()  # both gradients are autograd's alone
    return found[0]
