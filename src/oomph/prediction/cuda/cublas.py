"""Matrix products on cuBLAS: persistent workspaces, and products in a wider dtype than their factors."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from oomph.prediction.cuda.rules import Fake, aten_ops, bind, cuda_kernel
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

_MATRIX_PRODUCTS = aten_ops("""
    mm.default addmm.default addmm_.default bmm.default baddbmm.default baddbmm_.default addbmm.default
    _addmm_activation.default mv.default addmv.default dot.default _euclidean_dist.default
    _scaled_mm.default mm.out addmm.out bmm.out
""")
_PRODUCTS_IN_WIDER_DTYPE = aten_ops("""
    mm.dtype mm.dtype_out addmm.dtype addmm.dtype_out bmm.dtype bmm.dtype_out baddbmm.dtype baddbmm.dtype_out
""")
# cublasLt's own, beside cuBLAS's: the default of CUBLASLT_WORKSPACE_SIZE, as measured on an H200.
_CUBLASLT_BYTES = 1 << 20


class _Tracer(Protocol):
    gpu: Any

    def in_autograd_thread(self) -> bool: ...
    def stream(self) -> int: ...
    def record_workspace(self, size: int, op: str) -> Any: ...


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """What CUBLAS_WORKSPACE_CONFIG asks for, sizes in KiB times numbers of them, or else torch's default:
    32 MiB on Hopper and later, about 8 MiB before (ATen/cuda/CublasHandlePool.cpp)."""
    asked = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if asked:
        return 1024 * sum(int(size) * int(number) for size, number in asked)
    return 32 << 20 if capability[0] >= 9 else (4096 * 2 + 16 * 8) * 1024


class CublasWorkspaces:
    """Allocated at the first matrix product of a thread on a stream, inside the caching allocator, and never
    freed."""

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer = tracer
        self._held: set[tuple[str, bool, int]] = set()

    def allocate(self, func: OpOverload, args: Sequence[Any]) -> None:
        """The workspaces that the op is the first of its thread and stream to need."""
        looped = func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16
        if not looped and func not in _MATRIX_PRODUCTS and func not in _PRODUCTS_IN_WIDER_DTYPE:
            return
        self._hold("cublas workspace", cublas_workspace_bytes(self._tracer.gpu.capability))
        if func in (aten.addmm.default, aten._addmm_activation.default) and _adds_bias_in_epilogue(*args[:3]):
            self._hold("cublasLt workspace", _CUBLASLT_BYTES)

    def _hold(self, name: str, size: int) -> None:
        key = name, self._tracer.in_autograd_thread(), self._tracer.stream()
        if key not in self._held:
            self._held.add(key)
            self._tracer.record_workspace(size, name)


def _adds_bias_in_epilogue(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """A bias vector is added by cublasLt inside the product, not before it."""
    return bias.dim() == 1 and bias.is_contiguous() and min(*left.shape, *right.shape) > 1


@cuda_kernel(*_PRODUCTS_IN_WIDER_DTYPE)
def _product_in_wider_dtype(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Half-precision matrices with a float32 product: CUDA only, and torch cannot fake all of them."""
    if "out" in kwargs:
        return kwargs["out"]
    left, right, dtype = args[-3:]  # mm: left, right, dtype; addmm: added, left, right, dtype
    shape = [*left.shape[:-1], right.shape[-1]]
    return fake(aten.empty.memory_format, (shape,), {"dtype": dtype, "device": torch.device("cpu")})


@cuda_kernel(aten._grouped_mm.default)
def _grouped_product(fake: Fake, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """torch fakes it for bfloat16 alone; CUDA multiplies group by group in the other dtypes (native/cuda/
    GroupedBlas.cpp). Rows of the result are aligned to 16 bytes."""
    call = bind(func, args, kwargs)
    left, right = call["self"], call["mat2"]
    if left.dtype not in (torch.float32, torch.float16) or left.dtype != right.dtype:
        return fake(func, args, kwargs)
    shape = [*left.shape[:-1], right.shape[-1]]
    if left.dim() == right.dim() == 2:
        shape = [call["offs"].shape[0], *shape]
    elif right.dim() == 2:
        shape = shape[1:]
    alignment = 16 // left.element_size()
    padded = [*shape[:-1], -(-shape[-1] // alignment) * alignment]
    out = fake(aten.empty.memory_format, (padded,), {"dtype": left.dtype, "device": torch.device("cpu")})
    return out if padded == shape else fake(aten.slice.Tensor, (out, -1, 0, shape[-1]), {})
