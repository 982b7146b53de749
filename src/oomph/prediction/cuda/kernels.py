"""Ops whose results on CUDA differ from what the fake CPU kernel gives: the same op, with CUDA's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oomph.prediction.cuda.cudnn import memory_format
from oomph.prediction.cuda.recurrent import pack_padded_sequence
from oomph.prediction.cuda.temporaries import bind

aten = torch.ops.aten
Fake = Callable[[OpOverload, Sequence[Any], dict[str, Any]], Any]
Kernel = Callable[[Fake, OpOverload, Sequence[Any], dict[str, Any]], Any]


def _normalisation(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA's result is contiguous, and the mean and 1/std of half-precision inputs are kept in float32; the
    CPU's follow the input in both."""
    out, mean, rstd = fake(func, args, kwargs)
    out = _contiguous(fake, out)
    if mean.dtype in (torch.bfloat16, torch.float16):
        mean, rstd = (
            fake(aten.empty_like.default, (kept,), {"dtype": torch.float32}) for kept in (mean, rstd)
        )
    return out, mean, rstd


def _contiguous(fake: Fake, out: torch.Tensor) -> torch.Tensor:
    return _laid_out(fake, out, torch.contiguous_format)


def _contiguous_result(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """CUDA copies a strided input first and writes a contiguous result; the fake kernel keeps the strides."""
    return _contiguous(fake, fake(func, args, kwargs))


def _product_in_wider_dtype(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Half-precision matrices with a float32 product: CUDA only, and torch 2.11 cannot fake them."""
    if "out" in kwargs:
        return kwargs["out"]
    left, right = args[-3:-1]  # mm: left, right, dtype; addmm: added, left, right, dtype
    shape, dtype = [left.shape[0], right.shape[1]], args[-1]
    return fake(aten.empty.memory_format, (shape,), {"dtype": dtype, "device": torch.device("cpu")})


def _convolution(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """cuDNN's layout. The fake kernel gives that of the backend which the *host* would take, and so follows
    its processor, its thread count and whether oneDNN is still on: torch turns oneDNN off for the whole
    process when a half-precision product fails on a processor without such instructions."""
    call = bind(func, args, kwargs)
    format = memory_format(call["input"], call["weight"])
    out = fake(func, args, kwargs)
    if isinstance(out, torch.Tensor):
        return _laid_out(fake, out, format)
    input, weight, bias = out  # the gradients that were asked for
    return _laid_out(fake, input, format), _laid_out(fake, weight, format), bias


def _laid_out(fake: Fake, out: Any, format: torch.memory_format) -> Any:
    """The result in that memory format; None, a gradient that nobody asked for, stays None."""
    if out is None or out.is_contiguous(memory_format=format):
        return out
    return fake(aten.empty_like.default, (out,), {"memory_format": format})


CUDA_KERNELS: dict[OpOverload, Kernel] = {
    aten.native_layer_norm.default: _normalisation,
    aten.native_group_norm.default: _normalisation,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution,
    aten._softmax.default: _contiguous_result,
    aten._log_softmax.default: _contiguous_result,
    aten.roll.default: _contiguous_result,
    aten._pack_padded_sequence.default: pack_padded_sequence,
    aten.mm.dtype: _product_in_wider_dtype,
    aten.mm.dtype_out: _product_in_wider_dtype,
    aten.addmm.dtype: _product_in_wider_dtype,
    aten.addmm.dtype_out: _product_in_wider_dtype,
}
