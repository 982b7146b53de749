"""Matrix products: cuBLAS's workspaces, which it keeps, and products in a wider dtype than their factors.

Sources, in ATen: cuda/CublasHandlePool.cpp, native/cuda/Blas.cpp, native/cuda/GroupedBlas.cpp,
native/Linear.cpp.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from oomph.gpus import GPU
from oomph.prediction.allocator import round_up
from oomph.prediction.ops.registry import OpFacts, always, composite, cuda_kernel, flops, op, temporaries
from oomph.prediction.ops.rules import BoundArguments, Fake, Flops, RuleContext, bind
from oomph.torch_internals import OpOverload

aten = torch.ops.aten

_DTYPES = frozenset(
    (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)
_PRODUCT: dict[str, Any] = {"dtypes": _DTYPES, "uses_cublas": always}
op("mm.default mm.out mm.dtype mm.dtype_out", same_dtype=("self", "mat2"), **_PRODUCT)
op("bmm.default bmm.out bmm.dtype bmm.dtype_out", same_dtype=("self", "mat2"), **_PRODUCT)
op("addmm.default addmm_.default addmm.out", same_dtype=("self", "mat1", "mat2"), **_PRODUCT)
# What is added has the dtype of the result, not that of the matrices.
op("addmm.dtype addmm.dtype_out", same_dtype=("mat1", "mat2"), **_PRODUCT)
op("addbmm.default", same_dtype=("self", "batch1", "batch2"), **_PRODUCT)
op("addbmm_.default", same_dtype=("self", "batch1", "batch2"), dtypes=_DTYPES)
op("mv.default", same_dtype=("self", "vec"), **_PRODUCT)
op("baddbmm.default baddbmm_.default baddbmm.dtype baddbmm.dtype_out", uses_cublas=always)
op("_addmm_activation.default addmv.default dot.default _scaled_mm.default", uses_cublas=always)
op("_euclidean_dist.default", uses_cublas=always)
op("_grouped_mm.default", uses_cublas=lambda args: args[0].dtype != torch.bfloat16)  # in a loop over groups
op("mm.default addmm.default bmm.default baddbmm.default mm.out addmm.out", is_plain=True)

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
    """Allocated at the first call of cuBLAS by a thread on a stream, inside the caching allocator, and never
    freed."""

    def __init__(self, tracer: _Tracer) -> None:
        self._tracer = tracer
        self._held: set[tuple[str, bool, int]] = set()

    def allocate(self, facts: OpFacts, args: Sequence[Any]) -> None:
        """The workspaces that the op is the first of its thread and stream to need."""
        func, rule = facts.func, facts.uses_cublas
        if rule is None or not rule(args):
            return
        if any(isinstance(arg, torch.Tensor) and not arg.numel() for arg in args):
            return  # nothing to multiply
        self._hold("cublas workspace", cublas_workspace_bytes(self._tracer.gpu.capability))
        if func in (aten.addmm.default, aten._addmm_activation.default):
            bias, left, right = args[:3]
            # A bias vector is added by cublasLt inside the product, not before it.
            if bias.dim() == 1 and bias.is_contiguous() and min(*left.shape, *right.shape) > 1:
                self._hold("cublasLt workspace", _CUBLASLT_BYTES)

    def _hold(self, name: str, size: int) -> None:
        key = name, self._tracer.in_autograd_thread(), self._tracer.stream()
        if key not in self._held:
            self._held.add(key)
            self._tracer.record_workspace(size, name)


@temporaries("mm.default addmm.default addmm_.default _addmm_activation.default")
@temporaries("bmm.default baddbmm.default baddbmm_.default")
def _copied_factors(call: BoundArguments, gpu: GPU) -> list[int]:
    """cuBLAS reads matrices whose rows or columns are dense. Others, such as the expanded gradient of a sum,
    are copied (native/cuda/Blas.cpp)."""
    first = 1 if "mat1" in call or "batch1" in call else 0  # after what is added
    factors: list[torch.Tensor] = list(call.values())[first : first + 2]
    return [one.nbytes for one in factors if not _has_dense_rows_or_columns(one)]


def _has_dense_rows_or_columns(matrices: torch.Tensor) -> bool:
    (rows, columns), (row, column) = matrices.shape[-2:], matrices.stride()[-2:]
    dense_rows, dense_columns = column == 1 and row >= columns, row == 1 and column >= rows
    return dense_rows or dense_columns or matrices.is_contiguous() or matrices.mT.is_contiguous()


@cuda_kernel("mm.dtype mm.dtype_out addmm.dtype addmm.dtype_out")
@cuda_kernel("bmm.dtype bmm.dtype_out baddbmm.dtype baddbmm.dtype_out")
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
    padded = [*shape[:-1], round_up(shape[-1], alignment)]
    out = fake(aten.empty.memory_format, (padded,), {"dtype": left.dtype, "device": torch.device("cpu")})
    return out if padded == shape else fake(aten.slice.Tensor, (out, -1, 0, shape[-1]), {})


@composite(aten.linear.default)
def _linear(context: RuleContext, call: BoundArguments) -> Any:
    """Linear.cpp adds the bias to the product in place, except for tensor subclasses such as our fakes."""
    input, weight, bias = call["input"], call["weight"], call["bias"]
    if bias is None or input.dim() <= 2 or input.is_contiguous():
        return NotImplemented
    return torch.matmul(input, weight.t()).add_(bias)


# Work

_TILE = 128  # the side of the tile of a result that one multiprocessor commonly makes


def _multiplied(left: Tensor, right: Tensor) -> Flops:
    """Of [..., M, K] with [..., K, N]."""
    *batch, rows, depth = left.shape
    columns, count = right.shape[-1], math.prod(batch)
    tiles = count * -(-rows // _TILE) * -(-columns // _TILE)
    aligned = left.element_size() != 2 or not (
        columns % 8 or _leading_dimension(left) % 8 or _leading_dimension(right) % 8
    )
    kind = "product" if aligned else "unaligned product"
    return Flops(2.0 * count * rows * columns * depth, left.dtype, kind, tiles, depth)


def _leading_dimension(matrix: Tensor) -> int:
    """How far apart two rows (or columns) lie in memory, in elements; 0 where there is only one."""
    down, across = matrix.stride()[-2:]
    rows, columns = matrix.shape[-2:]
    if across == 1 and columns > 1:
        return down if rows > 1 else 0
    return across if columns > 1 else 0


@flops("mm.default mm.dtype mm.out mm.dtype_out bmm.default bmm.dtype bmm.out bmm.dtype_out")
def _product(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    return _multiplied(args[0], args[1])


@flops("addmm.default addmm.dtype addmm.out addmm.dtype_out addmm_.default _addmm_activation.default")
@flops("baddbmm.default baddbmm.dtype baddbmm.out baddbmm.dtype_out baddbmm_.default")
def _product_and_sum(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    return _multiplied(args[1], args[2])


@flops(aten._grouped_mm.default)
def _grouped(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Flops:
    """Groups of rows, each with its own matrix; or of a long sum, each with its own result."""
    left, right = args[0], args[1]
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 else 1
    return Flops(2.0 * left.numel() * right.shape[-1] / groups, left.dtype, "product")
