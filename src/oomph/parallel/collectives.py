"""Collectives with gradients, over the ranks of a process group.

Those of torch.distributed.nn.functional are deprecated in torch 2.13, and its sum has another gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_from_group(tensor: Tensor, group: Any) -> Tensor:
    """The sum over the ranks of a group; its gradient goes to each of them as it is."""
    result: Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def copy_to_group(tensor: Tensor, group: Any) -> Tensor:
    """The tensor itself, of which every rank computes a part of the result: its gradient is summed."""
    result: Tensor = _Copy.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def all_to_all(x: Tensor, group: Any) -> Tensor:
    """x[i] goes to rank i of the group, and the result [i] comes from it."""
    result: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        result = tensor.clone()
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _AllToAll.forward(ctx, grad, ctx.group), None
