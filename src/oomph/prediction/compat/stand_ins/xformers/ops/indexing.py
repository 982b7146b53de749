"""Memory: facebookresearch/xformers, xformers/ops/indexing.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oomph.prediction.compat import stand_ins

_kernel = partial(stand_ins.kernel, "xformers")


class _ScaledIndexAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None) -> Tensor:
        _kernel((x, index, source, scaling))
        ctx.mark_dirty(x)
        ctx.save_for_backward(index, scaling, source)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        index, scaling, source = ctx.saved_tensors
        grad_source = torch.empty_like(source)
        grad_scaling = None if scaling is None else scaling.new_empty(source.shape)
        _kernel((grad, index, source, scaling, grad_source, grad_scaling))
        return grad, None, grad_source, grad_scaling


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Any:
    """In place."""
    return _ScaledIndexAdd.apply(input, index, source, scaling)


class _IndexSelectCat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        sources, indices = given[: len(given) // 2], given[len(given) // 2 :]
        sizes = (index.shape[0] * source.shape[1] for source, index in zip(sources, indices, strict=True))
        out = sources[0].new_empty(sum(sizes))
        _kernel((*given, out))
        ctx.save_for_backward(*indices)
        ctx.shapes = [source.shape for source in sources]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = [grad.new_zeros(shape) for shape in ctx.shapes]
        _kernel((grad, *ctx.saved_tensors, *grads))
        return *grads, *([None] * len(grads))


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Any:
    """The rows of each source, all of them one after the other."""
    return _IndexSelectCat.apply(*sources, *indices)
