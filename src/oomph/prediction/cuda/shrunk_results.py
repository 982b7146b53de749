"""Results that CUDA makes large and then shrinks: they look small, and hold their first storage.

Sources, in ATen's native: Loss.cpp (mse, smooth_l1: one element per element of the input until the mean is
written), cuda/Loss.cu (binary cross entropy), cuda/Col2Im.cu and Im2Col.cu (as large as the input first).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oomph.gpus import GPU
from oomph.prediction.cuda import kernels
from oomph.prediction.cuda.kernels import Fake
from oomph.prediction.cuda.reductions import reduction_buffers
from oomph.prediction.cuda.temporaries import Bound, bind, temporaries

aten = torch.ops.aten
_NO_REDUCTION = 0


def _shrunk(fake: Fake, elements: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of `shape` in a storage of so many elements, or of its own size if that is larger."""
    whole = fake(aten.empty.memory_format, ([elements],), {"dtype": dtype, "device": torch.device("cpu")})
    return fake(aten.resize_.default, (whole, list(shape)), {})


def _loss(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = bind(func, args, kwargs)
    if call["reduction"] == _NO_REDUCTION:
        return fake(func, args, kwargs)
    shape, dtype = _elementwise(call)
    return _shrunk(fake, math.prod(shape), (), dtype)


def _fold(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    result = fake(func, args, kwargs)
    if args[0].numel() <= result.numel():
        return result
    return _shrunk(fake, args[0].numel(), result.shape, result.dtype)


kernels.CUDA_KERNELS.update(
    {
        aten.mse_loss.default: _loss,
        aten.smooth_l1_loss.default: _loss,
        aten.binary_cross_entropy.default: _loss,
        aten.col2im.default: _fold,
        aten.im2col.default: _fold,
    }
)


def _elementwise(call: Bound) -> tuple[torch.Size, torch.dtype]:
    given, target = call["self"], call["target"]
    return torch.broadcast_shapes(given.shape, target.shape), torch.promote_types(given.dtype, target.dtype)


def _reduced(call: Bound, gpu: GPU) -> list[int]:
    shape, dtype = _elementwise(call)
    return reduction_buffers((math.prod(shape),), (1,), None, dtype, gpu)


@temporaries(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def _loss_of_every_element(call: Bound, gpu: GPU) -> list[int]:
    if call["reduction"] == _NO_REDUCTION:
        return []
    shape, dtype = _elementwise(call)
    return [math.prod(shape) * dtype.itemsize, *_reduced(call, gpu)]


@temporaries(aten.binary_cross_entropy.default)
def _cross_entropy(call: Bound, gpu: GPU) -> list[int]:
    """Written into the result itself, whose mean then replaces it."""
    if call["reduction"] == _NO_REDUCTION:
        return []
    return [call["self"].element_size(), *_reduced(call, gpu)]
