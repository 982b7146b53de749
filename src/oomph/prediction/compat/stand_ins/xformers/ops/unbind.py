"""Memory: facebookresearch/xformers, xformers/ops/unbind.py: gradients that are adjacent are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.torch_internals import storage_id


def stack_or_none(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Their stack, if they are its parts already."""
    first, *others = tensors
    step = others[0].storage_offset() - first.storage_offset() if others else 0
    for index, each in enumerate(tensors):
        same = each.shape == first.shape and each.stride() == first.stride()
        offset = first.storage_offset() + index * step
        if not same or each.storage_offset() != offset:
            return None
        if storage_id(each.untyped_storage()) != storage_id(first.untyped_storage()):
            return None
    sizes, strides = list(first.shape), [int(each) for each in first.stride()]
    sizes.insert(dim, len(tensors))
    strides.insert(dim, int(step))
    return first.as_strided(sizes, strides)


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Any:
        ctx.dim = dim % x.dim()
        return x.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        stacked = stack_or_none(grads, ctx.dim)
        return torch.stack(grads, dim=ctx.dim) if stacked is None else stacked, None


def unbind(x: Tensor, dim: int) -> Any:
    return _Unbind.apply(x, dim)
