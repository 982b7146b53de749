"""cuBLAS's persistent workspaces: one per thread that multiplies matrices, held inside the allocator."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_MATRIX_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.addmm_.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.baddbmm_.default,
    aten.addbmm.default,
    aten._addmm_activation.default,
    aten.mv.default,
    aten.addmv.default,
    aten.dot.default,
    aten._euclidean_dist.default,
    aten._scaled_mm.default,
    aten.mm.out,
    aten.addmm.out,
    aten.bmm.out,
    aten.mm.dtype,
    aten.mm.dtype_out,
    aten.addmm.dtype,
    aten.addmm.dtype_out,
}
# cublasLt's own, beside cuBLAS's: the default of CUBLASLT_WORKSPACE_SIZE, as measured on an H200.
_CUBLASLT_BYTES = 1 << 20


class _Tracer(Protocol):
    gpu: Any

    def in_autograd_thread(self) -> bool: ...
    def book_workspace(self, size: int, op: str) -> Any: ...


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What CUBLAS_WORKSPACE_CONFIG asks for, sizes in KiB times numbers of them, or else torch's default:
    32 MiB on Hopper and later, about 8 MiB before (ATen/cuda/CublasHandlePool.cpp)."""
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return 1024 * sum(int(size) * int(number) for size, number in asked)
    return 32 << 20 if capability[0] >= 9 else (4096 * 2 + 16 * 8) * 1024


class Workspaces:
    """Allocated at a thread's first matrix product and never freed."""

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer = tracer
        self._held: set[tuple[str, bool]] = set()

    def after(self, func: OpOverload, args: Sequence[Any]) -> None:
        if func not in _MATRIX_PRODUCTS:
            return
        self._hold("cublas workspace", cublas_workspace_bytes(self._tracer.gpu.capability))
        if func in (aten.addmm.default, aten._addmm_activation.default) and _adds_bias_in_epilogue(*args[:3]):
            self._hold("cublasLt workspace", _CUBLASLT_BYTES)

    def _hold(self, name: str, size: int) -> None:
        thread = self._tracer.in_autograd_thread()
        if (name, thread) not in self._held:
            self._held.add((name, thread))
            self._tracer.book_workspace(size, name)


def _adds_bias_in_epilogue(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """A bias vector is added by cublasLt inside the product, not before it."""
    return bias.dim() == 1 and bias.is_contiguous() and min(*left.shape, *right.shape) > 1
