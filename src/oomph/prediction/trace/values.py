"""The values of small whole-number and boolean tensors, kept on the host beside their fakes.

Programs branch on these: is there padding, are sequences packed, how many tokens are masked. Where every
input of an op is known (made by arange, ones, zeros, or moved from real data), its result is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
LARGEST = 1 << 20  # elements; beyond it a value costs more than it tells
_FEW = 1 << 17  # elements up to which floats are kept too: masks made of ones, positions

_MAKERS = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.eye.default,
    aten.scalar_tensor.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
}
# The result is known whatever the values of the tensor it is made like.
_MAKERS_LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.zero_.default,
    aten.fill_.Scalar,
}


class Values:
    """Fake tensor -> its values, where they are known."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()
        self._spoilt = WeakIdKeyDictionary()  # storages that were written with something unknown

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor if tensor.device.type == "cpu" else None
        if tensor.untyped_storage() in self._spoilt:
            return None
        return self._known.get(tensor)

    def put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """State the values of a tensor, whatever was written into it before."""
        self._spoilt.pop(tensor.untyped_storage(), None)
        self._known[tensor] = value

    def follow(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        """After an op: compute its result for real if its inputs are known, or forget what it overwrote."""
        results = [
            item
            for item in (out if isinstance(out, (list, tuple)) else (out,))
            if isinstance(item, FakeTensor)
        ]
        if (
            not results
            or not all(map(_worth_keeping, results))
            or torch.Tag.nondeterministic_seeded in func.tags
        ):
            return self._forget(func, args, kwargs)
        if given:
            known = func in _MAKERS_LIKE or all(self.of(tensor) is not None for tensor in given)
        else:
            known = func in _MAKERS
        if not known:
            return self._forget(func, args, kwargs)
        try:
            real = func(*self._real(args), **self._real_options(kwargs))
        except Exception:  # a value is only a help: without it a rule decides
            return self._forget(func, args, kwargs)
        reals = real if isinstance(real, (list, tuple)) else (real,)
        for fake, value in zip(
            results, (item for item in reals if isinstance(item, torch.Tensor)), strict=False
        ):
            if fake.shape == value.shape:
                self._known[fake] = value
        return None

    def _forget(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Whatever the op wrote into, views of it and all, is no longer known."""
        if not func._schema.is_mutable:
            return
        for position, parameter in enumerate(func._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(parameter.name)
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, FakeTensor):
                        self._spoilt[tensor.untyped_storage()] = True

    def _real(self, args: Sequence[Any]) -> list[Any]:
        def real(arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                value = self.of(arg)
                return value if value is not None else torch.empty(arg.shape, dtype=arg.dtype)
            return [real(item) for item in arg] if isinstance(arg, (list, tuple)) else arg

        return [real(arg) for arg in args]

    def _real_options(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self._real([value])[0]
            for name, value in kwargs.items()
            if name not in ("device", "pin_memory")
        }


def _worth_keeping(tensor: torch.Tensor) -> bool:
    whole = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return tensor.numel() <= (LARGEST if whole else _FEW)
