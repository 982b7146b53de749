"""Normalizations, softmax, roll and losses: their results on CUDA, and what their kernels take besides.

Sources, in ATen's native/cuda: layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh, Loss.cu,
Col2Im.cu and Im2Col.cu; and native/Loss.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.cuda.cudnn import in_memory_format
from oomph.prediction.cuda.reductions import reduction_buffers
from oomph.prediction.cuda.rules import (
    BoundArguments,
    Fake,
    bind,
    contiguous_copy_bytes,
    cuda_kernel,
    temporaries,
)
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

_LONG = 64 * 1024  # rows
_ROWS_PER_BLOCK = 32
_GRID = 64 * 1024 // 2


@temporaries(aten.native_layer_norm.default)
def _layer_norm(call: BoundArguments, gpu: GPU) -> list[int]:
    return [contiguous_copy_bytes(call["input"]), contiguous_copy_bytes(call["weight"])]


@temporaries(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    given = zip((call["weight"], call["bias"]), call["output_mask"][1:], strict=True)
    parameters = [parameter for parameter, wanted in given if parameter is not None and wanted]
    copies = [contiguous_copy_bytes(call["grad_out"]), contiguous_copy_bytes(call["input"])]
    return copies + partial_sums(call["input"], math.prod(call["normalized_shape"]), parameters, gpu)


def partial_sums(tensor: Tensor, width: int, parameters: Sequence[Tensor], gpu: GPU) -> list[int]:
    """With many short rows, gradients of weight and bias are first summed over blocks of rows, then over the
    blocks. `width` is the length of a row. RMSNorm's backward does the same for its weight."""
    rows = tensor.numel() // max(width, 1)
    if rows <= _LONG or width // 32 >= gpu.multiprocessors // 2:
        return []
    blocks = min(_GRID // math.ceil(width / 32), math.ceil(rows / _ROWS_PER_BLOCK))
    events = [blocks * width * parameter.element_size() for parameter in parameters]
    for parameter in parameters:
        staging = reduction_buffers((blocks, width), (width, 1), [0], parameter.dtype, gpu)
        events += [width * parameter.element_size(), *staging, *(-size for size in staging)]
    return events


@temporaries(aten.native_group_norm.default)
def _group_norm(call: BoundArguments, gpu: GPU) -> list[int]:
    """A scale and a shift for each channel of each sample."""
    channels = call["N"] * call["C"] * max(call["input"].element_size(), 4)
    return [contiguous_copy_bytes(call["input"]), channels, channels]


@temporaries(aten.native_group_norm_backward.default)
def _group_norm_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """Sums per channel, and what they come to per group."""
    size = max(call["input"].element_size(), 4)
    channels, groups = call["N"] * call["C"] * size, call["N"] * call["group"] * size
    return [channels, channels, groups, groups, channels]


@temporaries(aten.native_batch_norm.default)
def _batch_norm(call: BoundArguments, gpu: GPU) -> list[int]:
    """Mean, variance and two counters of each block of rows, and a semaphore for each block of channels."""
    return _staging(call["input"], values=4)


@temporaries(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    return _staging(call["input"], values=2)


def _staging(tensor: Tensor, values: int) -> list[int]:
    """Rows are shared out over blocks where the channels lie next to each other, as in [N, C]."""
    if tensor.dim() != 2 or not tensor.is_contiguous():
        return []
    rows, channels = tensor.shape
    across = min(32, 1 << (channels.bit_length() - 1))
    down = min(1 << (math.ceil(rows / 16).bit_length() - 1), 512 // across)
    blocks = min(math.ceil(rows / (down * 16)), 128)
    if blocks < 8:
        return []
    return [values * channels * blocks * 4, math.ceil(channels / across) * 4]


@cuda_kernel(aten.native_layer_norm.default, aten.native_group_norm.default)
def _normalisation(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA's result is contiguous, and the mean and 1/std of half-precision inputs are kept in float32; the
    CPU's follow the input in both."""
    out, mean, rstd = fake(func, args, kwargs)
    out = in_memory_format(fake, out, torch.contiguous_format)
    if mean.dtype in (torch.bfloat16, torch.float16):
        mean, rstd = (
            fake(aten.empty_like.default, (kept,), {"dtype": torch.float32}) for kept in (mean, rstd)
        )
    return out, mean, rstd


# Softmax and roll read their input contiguously: a strided one is copied first.


@cuda_kernel(aten._softmax.default, aten._log_softmax.default, aten.roll.default)
def _contiguous_result(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA copies a strided input first and writes a contiguous result; the fake kernel keeps the strides."""
    return in_memory_format(fake, fake(func, args, kwargs), torch.contiguous_format)


@temporaries(aten.roll.default)
def _roll(call: BoundArguments, gpu: GPU) -> list[int]:
    """Several dimensions are rolled one after the other."""
    tensor = call["self"]
    between = tensor.numel() * tensor.element_size() if len(call["dims"]) > 1 else 0
    return [contiguous_copy_bytes(tensor), between]


@temporaries(aten._softmax.default, aten._log_softmax.default)
def _one_input(call: BoundArguments, gpu: GPU) -> list[int]:
    return [contiguous_copy_bytes(call["self"])]


# Results that CUDA makes large and then shrinks: they look small, and hold their first storage. mse and
# smooth_l1 take one element per element of the input until the mean is written, fold and unfold are as large
# as the input first.

_NO_REDUCTION = 0


def _shrunk(fake: Fake, elements: int, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor of `shape` in a storage of so many elements, or of its own size if that is larger."""
    whole = fake(aten.empty.memory_format, ([elements],), {"dtype": dtype, "device": torch.device("cpu")})
    return fake(aten.resize_.default, (whole, list(shape)), {})


@cuda_kernel(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.binary_cross_entropy.default)
def _loss(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = bind(func, args, kwargs)
    if call["reduction"] == _NO_REDUCTION:
        return fake(func, args, kwargs)
    shape, dtype = _elementwise(call)
    return _shrunk(fake, math.prod(shape), (), dtype)


@cuda_kernel(aten.col2im.default, aten.im2col.default)
def _fold(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    result = fake(func, args, kwargs)
    if args[0].numel() <= result.numel():
        return result
    return _shrunk(fake, args[0].numel(), result.shape, result.dtype)


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


@temporaries(aten.binary_cross_entropy.default)
def _cross_entropy(call: BoundArguments, gpu: GPU) -> list[int]:
    """Written into the result itself, whose mean then replaces it."""
    if call["reduction"] == _NO_REDUCTION:
        return []
    return [call["self"].element_size(), *_reduced(call, gpu)]
