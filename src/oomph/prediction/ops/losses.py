"""Losses, and distances of rows.

A loss that is reduced takes one element per element of the input until the mean is written. Results that CUDA
makes large and then shrinks look small, and hold their first storage. Sources, in ATen: native/Loss.cpp,
native/cuda/Loss.cu.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from oomph.gpus import GPU
from oomph.prediction.ops.reductions import reduction_buffers
from oomph.prediction.ops.registry import always, cuda_kernel, op, temporaries
from oomph.prediction.ops.rules import BoundArguments, Fake, bind, shrunk
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

_NO_REDUCTION = 0

op("nll_loss_forward", gathers=True)
op("nll_loss_backward", reads_first=False, only_writes=True, launches=2)  # the logits' shape is taken
op("nll_loss_forward.default", same_dtype=("self", "weight"))
op("nll_loss2d_forward.default", nondeterministic=lambda call: call["reduction"] != _NO_REDUCTION)
op("_ctc_loss.Tensor _ctc_loss_backward.Tensor", takes_two_devices=True)  # lengths are on the host
op("multi_margin_loss.default multi_margin_loss_backward.default", half_on_cuda_only=True)
op(
    "multilabel_margin_loss_forward.default multilabel_margin_loss_backward.default",
    half_on_cuda_only=True,
)
op("_ctc_loss_backward.default", nondeterministic=always)


@cuda_kernel(aten.mse_loss.default, aten.smooth_l1_loss.default)
@cuda_kernel(aten.binary_cross_entropy.default, aten.soft_margin_loss.default)
def _loss(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = bind(func, args, kwargs)
    if call["reduction"] == _NO_REDUCTION:
        return fake(func, args, kwargs)
    shape, dtype = _elementwise(call)
    return shrunk(fake, math.prod(shape), (), dtype)


def _elementwise(call: BoundArguments) -> tuple[torch.Size, torch.dtype]:
    given, target = call["self"], call["target"]
    return torch.broadcast_shapes(given.shape, target.shape), torch.promote_types(given.dtype, target.dtype)


def _reduced(call: BoundArguments, gpu: GPU) -> list[int]:
    shape, dtype = _elementwise(call)
    return reduction_buffers((math.prod(shape),), (1,), None, dtype, gpu)


@temporaries(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def _loss_of_every_element(call: BoundArguments, gpu: GPU) -> list[int]:
    if call["reduction"] == _NO_REDUCTION:
        return []
    shape, dtype = _elementwise(call)
    return [math.prod(shape) * dtype.itemsize, *_reduced(call, gpu)]


@temporaries(aten.binary_cross_entropy.default, aten.soft_margin_loss.default)
def _cross_entropy(call: BoundArguments, gpu: GPU) -> list[int]:
    """Written into the result itself, whose mean then replaces it."""
    if call["reduction"] == _NO_REDUCTION:
        return []
    return [call["self"].element_size(), *_reduced(call, gpu)]


@temporaries(aten.binary_cross_entropy_with_logits.default)
def _cross_entropy_with_logits(call: BoundArguments, gpu: GPU) -> list[int]:
    """log(sigmoid(x)), 1 - target, which becomes the loss, and the factors of the positive targets."""
    shape, dtype = _elementwise(call)
    whole = math.prod(shape) * dtype.itemsize
    loss = [whole, *_reduced(call, gpu)] if call["reduction"] != _NO_REDUCTION else []
    factors = call["pos_weight"]
    if factors is None:
        return [whole, *loss]
    return [whole, factors.numel() * dtype.itemsize, whole, -factors.numel() * dtype.itemsize, -whole, *loss]


@temporaries(aten.soft_margin_loss_backward.default)
def _soft_margin_loss_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """-target, -target * x and its exponential; two of them at a time."""
    shape, dtype = _elementwise(call)
    whole = math.prod(shape) * dtype.itemsize
    return [whole, whole, -whole, whole]


@cuda_kernel(aten.log_sigmoid_forward.default)
def _log_sigmoid(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA needs no buffer for the gradient."""
    out, _ = fake(func, args, kwargs)
    return out, fake(aten.new_empty.default, (out, [0]), {})


@temporaries(aten._pdist_backward.default)
def _distances_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """Each pair's part of both gradients."""
    rows = call["self"]
    return [(rows.size(0) - 1) * rows.numel() * rows.element_size()]
