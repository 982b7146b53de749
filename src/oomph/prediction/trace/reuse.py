"""Where autograd writes into a tensor that it already holds, rather than making a new one.

It does so for plain tensors and never for tensor subclasses such as our fakes: their sums and scatters arrive
as ordinary ops, each with a result of its own. Whether a real tensor would have been reused is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.prediction.trace.fast_path import is_dense
from oomph.prediction.trace.ledger import Ledger

aten = torch.ops.aten


# The formulas of gather, index, max and their like scatter a gradient into fresh zeros.
_SCATTERS = {
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.index_put.default,
    aten.index_add.default,
    aten.masked_scatter.default,
}
_ZEROS = {"aten.new_zeros", "aten.zeros", "aten.zeros_like"}


class Reuse:
    """Knows the reference counts that a tensor held by autograd alone shows inside a dispatch mode."""

    def __init__(self, mode: FakeTensorMode, ledger: Ledger) -> None:
        self._ledger = ledger
        # How many references the way here adds differs between versions of torch: look at a known case.
        self._alone = _count_known_case(mode)

    def of_first(self, func: OpOverload, args: Sequence[Any]) -> bool:
        """Whether autograd would write the op's result into its first argument."""
        if func in _SCATTERS:
            draft = self._ledger.draft_of(args[0])
            return draft is not None and draft.op in _ZEROS
        return func is aten.add.Tensor and self._is_sum_of_gradients(*args[:2])

    def _is_sum_of_gradients(self, first: Any, second: Any) -> bool:
        """A tensor used twice gets two gradients; the second is added to the first if nobody else has it."""
        if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
            return False
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return is_dense(first.shape, first.stride()) and _counts(first) == self._alone


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


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
