"""Where a tensor is used twice, autograd adds its gradients: in place if nobody else holds the first one.

It never does so for tensor subclasses, so for our fakes the sums arrive as ordinary additions, each with a
result of its own. Whether a real tensor would have been reused is read from the same reference counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Accumulation:
    """Knows the reference counts that a tensor held by autograd alone shows inside a dispatch mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        # How many references the way here adds differs between versions of torch: look at a known case.
        self._alone = _count_known_case(mode)

    def reuses_first(self, func: OpOverload, args: Sequence[Any]) -> bool:
        if func is not aten.add.Tensor or len(args) < 2:
            return False
        first, second = args[:2]
        if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
            return False
        if first.shape != second.shape or first.dtype != second.dtype or not _is_dense(first):
            return False
        return _counts(first) == self._alone


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


def _is_dense(tensor: torch.Tensor) -> bool:
    """No gaps and no overlaps: some order of the dimensions makes it contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _count_known_case(mode: FakeTensorMode) -> tuple[int, int]:
    found: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten.add.Tensor and torch._C._current_autograd_node() is not None:
                found.append(_counts(args[0]))
            return mode.__torch_dispatch__(func, types, args, kwargs or {})

    with torch._C.DisableTorchFunction(), torch.enable_grad(), Look():
        leaf = torch.ones(2, requires_grad=True)
        twice = leaf * 2
        (torch.sin(twice) + torch.tanh(twice)).sum().backward()  # both gradients are autograd's alone
    return found[0]
