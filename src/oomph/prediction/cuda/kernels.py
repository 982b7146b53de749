"""Ops whose results on CUDA differ from what the fake CPU kernel gives: the same op, with CUDA's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
Fake = Callable[[OpOverload, Sequence[type], Sequence[Any], dict[str, Any]], Any]
Kernel = Callable[[Any, Fake, OpOverload, Sequence[type], Sequence[Any], dict[str, Any]], Any]


def _statistics_in_float32(
    tracer: Any, fake: Fake, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """CUDA keeps the mean and 1/std of half-precision inputs in float32; the CPU in the input's type."""
    out, mean, rstd = fake(func, types, args, kwargs)
    if mean.dtype not in (torch.bfloat16, torch.float16):
        return out, mean, rstd
    as_float = {"dtype": torch.float32}
    return (
        out,
        fake(aten.empty_like.default, (), (mean,), as_float),
        fake(aten.empty_like.default, (), (rstd,), as_float),
    )


CUDA_KERNELS: dict[OpOverload, Kernel] = {
    aten.native_layer_norm.default: _statistics_in_float32,
    aten.native_group_norm.default: _statistics_in_float32,
}
