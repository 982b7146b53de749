"""What the normalisations' CUDA kernels take beside their results.

Sources, in ATen's native/cuda: layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.cuda.copies import copy_if_strided
from oomph.prediction.cuda.reductions import reduction_buffers
from oomph.prediction.cuda.temporaries import Bound, temporaries

aten = torch.ops.aten

_LONG = 64 * 1024  # rows
_ROWS_PER_BLOCK = 32
_GRID = 64 * 1024 // 2


@temporaries(aten.native_layer_norm.default)
def _layer_norm(call: Bound, gpu: GPU) -> list[int]:
    return [copy_if_strided(call["input"]), copy_if_strided(call["weight"])]


@temporaries(aten.native_layer_norm_backward.default)
def _layer_norm_backward(call: Bound, gpu: GPU) -> list[int]:
    given = zip((call["weight"], call["bias"]), call["output_mask"][1:], strict=True)
    parameters = [parameter for parameter, wanted in given if parameter is not None and wanted]
    copies = [copy_if_strided(call["grad_out"]), copy_if_strided(call["input"])]
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
def _group_norm(call: Bound, gpu: GPU) -> list[int]:
    """A scale and a shift for each channel of each sample."""
    channels = call["N"] * call["C"] * max(call["input"].element_size(), 4)
    return [copy_if_strided(call["input"]), channels, channels]


@temporaries(aten.native_group_norm_backward.default)
def _group_norm_backward(call: Bound, gpu: GPU) -> list[int]:
    """Sums per channel, and what they come to per group."""
    size = max(call["input"].element_size(), 4)
    channels, groups = call["N"] * call["C"] * size, call["N"] * call["group"] * size
    return [channels, channels, groups, groups, channels]


@temporaries(aten.native_batch_norm.default)
def _batch_norm(call: Bound, gpu: GPU) -> list[int]:
    """Mean, variance and two counters of each block of rows, and a semaphore for each block of channels."""
    return _staging(call["input"], values=4)


@temporaries(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: Bound, gpu: GPU) -> list[int]:
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
