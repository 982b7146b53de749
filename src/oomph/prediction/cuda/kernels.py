"""Ops whose results on CUDA differ from what the fake CPU kernel gives: the same op, with CUDA's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from oomph.prediction.cuda.recurrent import pack_padded_sequence

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
    if out.is_contiguous():
        return out
    return fake(aten.empty_like.default, (out,), {"memory_format": torch.contiguous_format})


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


CUDA_KERNELS: dict[OpOverload, Kernel] = {
    aten.native_layer_norm.default: _normalisation,
    aten.native_group_norm.default: _normalisation,
    aten._softmax.default: _contiguous_result,
    aten._log_softmax.default: _contiguous_result,
    aten.roll.default: _contiguous_result,
    aten._pack_padded_sequence.default: pack_padded_sequence,
    aten.mm.dtype: _product_in_wider_dtype,
    aten.mm.dtype_out: _product_in_wider_dtype,
    aten.addmm.dtype: _product_in_wider_dtype,
    aten.addmm.dtype_out: _product_in_wider_dtype,
}
