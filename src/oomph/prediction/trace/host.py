"""Ops that do not touch the pretend GPU: real where they are small, so that host code works as always."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from oomph.prediction.trace import estimates
from oomph.prediction.trace.arguments import tensors_in
from oomph.prediction.trace.tracer import Tracer

aten = torch.ops.aten

# Above this, a host tensor that the program asks for is not really made. Below it, host data is real: data
# loaders, seeds and `.item()` on the host give what they give outside a trace.
REAL_BYTES = 4 << 20
_MAY_GROW = 4 << 10  # two real inputs smaller than this cannot make a result that matters


class Host:
    def __init__(self, tracer: Tracer, fake: Callable[..., Any]) -> None:
        self._tracer = tracer
        self._fake = fake

    def run(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Fake, and not counted, where it is large or made of what is fake; else for real."""
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func is aten._local_scalar_dense.default:
                return estimates.scalar(self._tracer, args[0])
            if func is aten.copy_.default and not isinstance(args[0], FakeTensor):
                return self.copy_in(args[0], args[1])
            out = self._fake(func, args, kwargs)
            self._tracer.values.follow(func, args, kwargs, tensors, out)
            return out
        if self._may_be_large(func, kwargs, tensors):
            try:
                pretended = self._fake(func, args, kwargs)
            except Exception:  # real data may serve where fake data does not
                return func(*args, **kwargs)
            results = pretended if isinstance(pretended, (list, tuple)) else (pretended,)
            if any(_bytes_of(result) > REAL_BYTES for result in tensors_in(results, {})):
                return pretended
        return func(*args, **kwargs)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """A copy from the GPU into real memory, which is not ours to count. Known values arrive."""
        value = self._tracer.values.of(source)
        return target if value is None else target.copy_(value)

    def _may_be_large(
        self, func: OpOverload, kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]
    ) -> bool:
        if func._schema.is_mutable or func.is_view or func is aten._local_scalar_dense.default:
            return False
        asked = kwargs.get("device")
        if any(tensor.is_meta for tensor in tensors) or (asked is not None and asked.type == "meta"):
            return False
        return not tensors or max(map(_bytes_of, tensors)) > _MAY_GROW


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
