"""The base weight W [d, f]: products with it where it is stored in another dtype, or in 8 bits.

A weight of the product's own dtype is used as it lies in memory, transposed views included. Any other is
converted a slice at a time, so that a converted copy of the whole never exists. `h W` is sliced along f and
`g W^T` along d: then each element of a result comes from one product, and is rounded once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops.common import check_same_device, has_values, matmul_into
from oomph.units import MiB

# The largest converted slice: large enough that its products run at full speed, small beside any activation.
SLICE_BYTES = 32 * MiB


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A frozen weight [d, f] in 8 bits: `values` int8 [d, f] times `scale` [f], one per output column."""

    values: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        values, scale = self.values, self.scale
        if values.dtype != torch.int8 or values.dim() != 2:
            given = f"{values.dtype} {list(values.shape)}"
            raise ArgumentError(f"Int8Weight values are {given}; valid: torch.int8 [d, f]")
        if not scale.is_floating_point() or scale.shape != values.shape[1:] or scale.requires_grad:
            given = f"{scale.dtype} {list(scale.shape)}{', trained' if scale.requires_grad else ''}"
            raise ArgumentError(f"Int8Weight scale is {given}; valid: float [{values.shape[1]}], frozen")
        check_same_device(values=values, scale=scale)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole weight in a float dtype: for inspection, and for impl="reference"."""
        return (self.values * self.scale).to(dtype)


def quantize_int8(weight: Tensor) -> Int8Weight:
    """Round a weight [d, f] to 255 levels per column, symmetric about zero; column j errs by <= scale[j] / 2.

    The same weight always gives the same bits. A column of zeros stays exactly zero.
    """
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        is_tensor = isinstance(weight, Tensor)
        given = f"{weight.dtype} {list(weight.shape)}" if is_tensor else type(weight).__name__
        raise ArgumentError(f"quantize_int8 was given {given}; valid: a float tensor [d, f]")
    weight = weight.detach()
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[1], dtype=torch.float32, device=weight.device)
    for start, stop in _spans(weight.shape[1], weight.shape[0] * 4):
        columns = weight[:, start:stop].to(torch.float32, copy=True)
        # A norm, because abs() would make a copy of the columns.
        step = torch.linalg.vector_norm(columns, math.inf, dim=0) / 127 if len(weight) else columns.sum(0)
        # A step of zero (no weight, or one too small for float32) would divide zero by zero.
        step = step.masked_fill_(step == 0, 1.0)
        values[:, start:stop] = columns.div_(step).round_().clamp_(-127, 127)
        del columns  # before the next are made
        scale[start:stop] = step
    if has_values(weight) and not bool(scale.isfinite().all()):
        raise ArgumentError("quantize_int8 was given a weight with NaN or infinity; valid: finite numbers")
    return Int8Weight(values, scale)


def add_times_weight(out_Nf: Tensor, h_Nd: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    """out += h W."""
    for start, stop, slice_dw in _slices(weight, scale, 1, h_Nd.dtype):
        matmul_into(out_Nf[:, start:stop], h_Nd, slice_dw, add=True)


def add_times_weight_transposed(out_Nd: Tensor, g_Nf: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    """out += g W^T."""
    for start, stop, slice_wf in _slices(weight, scale, 0, g_Nf.dtype):
        matmul_into(out_Nd[:, start:stop], g_Nf, slice_wf.t(), add=True)


def weight_gradient(h_Nd: Tensor, g_Nf: Tensor, weight: Tensor) -> Tensor:
    """h^T g in the weight's dtype and memory layout."""
    grad = torch.empty_like(weight)
    if weight.dtype == h_Nd.dtype:
        matmul_into(grad, h_Nd.t(), g_Nf)
        return grad
    for start, stop in _spans(weight.shape[1], weight.shape[0] * h_Nd.element_size()):
        grad[:, start:stop] = h_Nd.t() @ g_Nf[:, start:stop]
    return grad


def _slices(
    weight: Tensor, scale: Tensor | None, dim: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, Tensor]]:
    """The weight in `dtype`, as slices (start, stop, tensor) along `dim`; each is overwritten by the next."""
    length, other = weight.shape[dim], weight.shape[1 - dim]
    if weight.dtype == dtype:
        yield 0, length, weight
        return
    spans = list(_spans(length, other * dtype.itemsize))
    if not spans:
        return
    buffer = torch.empty((spans[0][1] - spans[0][0]) * other, dtype=dtype, device=weight.device)
    for start, stop in spans:
        stored = weight.narrow(dim, start, stop - start)
        converted = buffer[: stored.numel()].view(stored.shape)
        if scale is None:
            converted.copy_(stored)
        else:
            # One kernel: the product is made in the scale's dtype and rounded as it is written.
            torch.mul(stored, scale[start:stop] if dim == 1 else scale, out=converted)
        yield start, stop, converted


def _spans(length: int, bytes_each: int) -> Iterator[tuple[int, int]]:
    """Cut `length` into pieces of at most SLICE_BYTES; whole multiples of 64 where that much fits."""
    step = max(1, SLICE_BYTES // max(1, bytes_each))
    step = step // 64 * 64 or step
    for start in range(0, length, step):
        yield start, min(start + step, length)
