"""Ops that go over their tensors element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.ops.registry import cuda_kernel, temporaries
from oomph.prediction.ops.rules import BoundArguments, Fake
from oomph.torch_internals import OpOverload

aten = torch.ops.aten


@cuda_kernel(aten.where.self)
def _where(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A condition of bytes is copied to one of bools first (native/TensorCompare.cpp); the fake kernel
    refuses it."""
    condition, *others = args
    if condition.dtype == torch.uint8:
        condition = fake(aten._to_copy.default, (condition,), {"dtype": torch.bool})
    return fake(func, (condition, *others), kwargs)


@temporaries(aten.where.self)
def _condition_of_bools(call: BoundArguments, gpu: GPU) -> list[int]:
    condition = call["condition"]
    return [condition.numel()] if condition.dtype == torch.uint8 else []
