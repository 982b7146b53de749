"""Normalizations and softmax.

Sources, in ATen's native/cuda: layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cuh, SoftMax.cu; and
native/Normalization.cpp, native/layer_norm.cpp, native/transformers/attention.cpp (_safe_softmax). The
figures come out exactly as measured on an H200 with torch 2.11.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.ops.reductions import WELFORD, reduction_buffers
from oomph.prediction.ops.registry import composite, cuda_kernel, op, temporaries
from oomph.prediction.ops.rules import (
    HALF,
    NEXT_RESULT,
    BoundArguments,
    CompositeRule,
    Fake,
    RuleContext,
    Temporary,
    bind,
    contiguous_copies,
    contiguous_copy_bytes,
    contiguous_result,
    freed,
    in_memory_format,
    program_error,
)
from oomph.torch_internals import OpOverload, decomposition_table, suggest_memory_format

aten = torch.ops.aten

# Work: statistics are taken in a first pass over the inputs and applied in a second; gradients of a
# normalization's own parameters are summed in a pass of their own.

op("native_group_norm cudnn_batch_norm _batch_norm_with_update", passes=2)
op("cudnn_batch_norm_backward batch_norm_backward", passes=2)
op("native_batch_norm native_batch_norm_backward", passes=2, launches=2)
op("native_layer_norm_backward", passes=2, launches=3)
op("native_group_norm_backward", passes=2, launches=4)

# Layer norm and RMSNorm

op(
    "native_layer_norm.default",
    same_dtype=("input", "weight", "bias"),
    temporaries=contiguous_copies("input", "weight"),
)

_LONG = 64 * 1024  # rows
_ROWS_PER_BLOCK = 32
_GRID = 64 * 1024 // 2


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
        staging = reduction_buffers((blocks, width), (width, 1), (0,), parameter.dtype, gpu)
        events += [width * parameter.element_size(), *staging, *freed(staging)]
    return events


@composite(aten.rms_norm.default)
def _rms_norm(context: RuleContext, call: BoundArguments) -> Any:
    input, weight, shape = call["input"], call["weight"], list(call["normalized_shape"])
    if input.dtype == torch.float64 or (weight is not None and weight.dtype != input.dtype):
        return NotImplemented
    if list(input.shape[-len(shape) :]) != shape:
        return NotImplemented  # torch says what is wrong
    if context.compiling():
        decompose = decomposition_table[aten._fused_rms_norm.default]
        return decompose(input, call["normalized_shape"], weight, call["eps"])[0]
    return _FusedRmsNorm.apply(input, weight, len(call["normalized_shape"]), context)


class _FusedRmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, which has no fake kernel: the result, and 1/rms in float32 kept for backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dims: int, context: RuleContext
    ) -> torch.Tensor:
        ctx.context = context
        ctx.width = math.prod(input.shape[input.dim() - dims :])
        rows = input.shape[: input.dim() - dims]
        rstd = input.new_empty((math.prod(rows), 1), dtype=torch.float32)
        ctx.save_for_backward(input, weight, rstd)
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        context.count_kernel(input, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        input, weight, _ = ctx.saved_tensors
        context: RuleContext = ctx.context
        if weight is None:
            grad_input = torch.empty_like(input)
            context.count_kernel(grad, input, grad_input)
            return grad_input, None, None, None
        grads = torch.empty_like(input), torch.empty_like(weight)
        context.count_kernel(grad, input, grads[0])
        context.count_kernel(grad, input, grads[1])
        rule = functools.partial(partial_sums, input, ctx.width, [weight], context.gpu)
        sums: list[int] = context.guard.call("temporaries", "aten.rms_norm", rule, list)
        held = [input.new_empty(size, dtype=torch.uint8) for size in sums if size > 0]
        del held
        return *grads, None, None


# Group norm

op("native_group_norm.default", same_dtype=("input", "weight", "bias"))


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


@cuda_kernel(aten.native_layer_norm.default, aten.native_group_norm.default)
def _normalisation(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA's result is contiguous. Layer norm keeps mean and 1/std of half-precision inputs in float32, group
    norm in the weight's type; the CPU's follow the input in all."""
    out, *kept = fake(func, args, kwargs)
    wanted = kept[0].dtype
    if func is aten.native_layer_norm.default and wanted in HALF:
        wanted = torch.float32
    elif func is aten.native_group_norm.default:
        given = [each for each in args[:2] if each is not None]
        wanted = given[-1].dtype
    out = in_memory_format(fake, out, torch.contiguous_format)
    return out, *(_in_dtype(fake, each, wanted) for each in kept)


@cuda_kernel(aten.native_group_norm_backward.default)
def _group_norm_gradients(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In the types of what they are for; the fake kernel's come from all inputs'."""
    call = bind(func, args, kwargs)
    input, weight = call["input"], call["weight"]
    sources = input, weight, weight
    return tuple(
        made if made is None or source is None else _in_dtype(fake, made, source.dtype)
        for made, source in zip(fake(func, args, kwargs), sources, strict=True)
    )


def _in_dtype(fake: Fake, tensor: Any, dtype: torch.dtype) -> Any:
    return tensor if tensor.dtype == dtype else fake(aten.empty_like.default, (tensor,), {"dtype": dtype})


# Batch norm


@temporaries(aten.native_batch_norm.default)
def _batch_norm(call: BoundArguments, gpu: GPU) -> list[int]:
    """Mean, variance and two counters of each block of rows, and a semaphore for each block of channels."""
    input = call["input"]
    if not call["training"] or uses_cudnn_batch_norm(call, training=True):
        return []
    channels_last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    if input.is_contiguous() or channels_last:
        return _batch_norm_staging(input, values=4)
    # Any other strides: the mean and variance of a float32 copy that keeps them.
    copy = input.numel() * 4 if input.element_size() < 4 else 0
    dims = tuple(dim for dim in range(input.dim()) if dim != 1)
    reduced = input.shape, input.stride(), dims, torch.float32
    return [copy, *reduction_buffers(*reduced, gpu, accumulator=WELFORD, input_vector=2)]


@temporaries(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: BoundArguments, gpu: GPU) -> list[Temporary]:
    input, grad = call["input"], call["grad_out"]
    if call["train"] and uses_cudnn_batch_norm(call, training=True):
        return [0 if grad.is_contiguous(memory_format=suggest_memory_format(input)) else grad.nbytes]
    staging = _batch_norm_staging(input, values=2)
    results = [NEXT_RESULT] * sum(call["output_mask"]) if staging else []
    return [*staging, *freed(staging), *results]  # the sums come before the gradients


@cuda_kernel(aten.native_batch_norm.default)
def _batch_norm_results(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    out, *kept = fake(func, args, kwargs)
    return out, *(_in_dtype(fake, each, torch.float32) if each.dtype in HALF else each for each in kept)


# SyncBatchNorm calls these itself, and CUDA alone has them: native/cuda/Normalization.cuh. What is known of a
# channel is in float32 for half-precision inputs.
@cuda_kernel(aten.batch_norm_stats.default)
def _channel_stats(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return tuple(_of_channels(fake, args[0], _accumulated(args[0].dtype)) for _ in range(2))


@cuda_kernel(aten.batch_norm_gather_stats.default, aten.batch_norm_gather_stats_with_counts.default)
def _gathered_stats(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return tuple(_of_channels(fake, args[0], _accumulated(args[1].dtype)) for _ in range(2))


@cuda_kernel(aten.batch_norm_elemt.default, aten.batch_norm_backward_elemt.default)
def _normalised(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return fake(aten.empty_like.default, (args[0],), {})


@cuda_kernel(aten.batch_norm_backward_reduce.default)
def _channel_sums(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = bind(func, args, kwargs)
    weight = call["mean"] if call["weight"] is None else call["weight"]
    likes = call["mean"], call["mean"], weight, weight
    wanted = call["input_g"], call["input_g"], call["weight_g"], call["bias_g"]
    return tuple(
        _of_channels(fake, call["input"], like.dtype) if is_wanted else None
        for like, is_wanted in zip(likes, wanted, strict=True)
    )


@temporaries(aten.batch_norm_stats.default)
def _channel_stats_staging(call: BoundArguments, gpu: GPU) -> list[int]:
    return _batch_norm_staging(call["input"], values=4)


@temporaries(aten.batch_norm_backward_reduce.default)
def _channel_sums_staging(call: BoundArguments, gpu: GPU) -> list[int]:
    return _batch_norm_staging(call["input"], values=2)


def _of_channels(fake: Fake, tensor: Tensor, dtype: torch.dtype) -> Any:
    return fake(aten.new_empty.default, (tensor, [tensor.size(1)]), {"dtype": dtype})


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def uses_cudnn_batch_norm(call: BoundArguments, training: bool) -> bool:
    """As Normalization.cpp decides. cuDNN reads tensors in their suggested memory format only; torch's own
    kernels read any strides. A backward pass does not know its bias."""
    input, weight = call["input"], call["weight"]
    if not torch.backends.cudnn.enabled or weight is None or call.get("bias", weight) is None:
        return False
    if torch.bfloat16 in (input.dtype, weight.dtype):
        return False
    if input.dtype == torch.float16 and weight.dtype != torch.float32:
        return False
    largest_batch = 880801 if training else 65535
    return input.dim() >= 3 and input.size(0) <= largest_batch and input.numel() < 2**31 - 1


def _batch_norm_staging(tensor: Tensor, values: int) -> list[int]:
    """Rows are shared out over blocks where the channels lie next to each other, as in [N, C]."""
    if tensor.is_contiguous():
        channels_last = tensor.stride(1) == 1
    else:
        channels_last = suggest_memory_format(tensor) is not torch.contiguous_format
    if not channels_last:
        return []
    channels = tensor.size(1)
    rows = tensor.numel() // channels
    across = min(32, 1 << (channels.bit_length() - 1))
    down = min(1 << (math.ceil(rows / 16).bit_length() - 1), 512 // across)
    blocks = min(math.ceil(rows / (down * 16)), 128)
    if blocks < 8:
        return []
    return [values * channels * blocks * 4, math.ceil(channels / across) * 4]


@composite(aten.batch_norm.default)
def _readable_by_cudnn(context: RuleContext, call: BoundArguments) -> Any:
    """Its input is copied first, where cuDNN cannot read it as it is."""
    input = call["input"]
    wanted = suggest_memory_format(input)
    if input.numel() == 0 or input.is_contiguous(memory_format=wanted):
        return NotImplemented
    if not uses_cudnn_batch_norm(call, call["training"]):
        return NotImplemented
    copied = input.contiguous(memory_format=wanted)
    try:
        return torch.batch_norm(**(dict(call) | {"input": copied}))
    except RuntimeError as error:
        raise program_error(error)  # noqa: B904 (the same exception)


# Softmax

op(
    "_softmax.default _log_softmax.default",
    is_plain=True,
    results=contiguous_result,
    temporaries=contiguous_copies("self"),
)
op("_softmax_backward_data.default", is_plain=True)
op(
    "_log_softmax_backward_data.default",
    is_plain=True,
    temporaries=contiguous_copies("grad_output", "output"),
)


@temporaries(aten._safe_softmax.default)
def _safe_softmax(call: BoundArguments, gpu: GPU) -> list[int]:
    """Rows that are masked altogether are found (one byte per score) and set to zero."""
    scores = call["self"]
    columns = max(scores.size(call["dim"]), 1) if scores.dim() else 1
    return [scores.numel(), scores.numel() // columns, scores.element_size()]


@temporaries(aten._softmax_backward_data.default)
def _softmax_backward(call: BoundArguments, gpu: GPU) -> list[int]:
    """grad_output * output, as large as the scores. log_softmax's backward needs no such product."""
    grad, output = call["grad_output"], call["output"]
    return [output.numel() * torch.promote_types(grad.dtype, output.dtype).itemsize]


def _float_from_half(kernel: OpOverload) -> CompositeRule:
    """One kernel reads half precision and writes float32."""

    def rule(context: RuleContext, call: BoundArguments) -> Any:
        if call["self"].dtype == torch.float16 and call["dtype"] == torch.float32:
            return kernel(call["self"], call["dim"], True)
        return NotImplemented

    return rule


op("softmax.int", composite=_float_from_half(aten._softmax.default))
op("log_softmax.int", composite=_float_from_half(aten._log_softmax.default))
