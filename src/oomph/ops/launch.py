"""Launching Triton kernels, on real tensors and in predictions.

A prediction runs the same Python code on fake tensors. Everything around a kernel (checks, allocations,
matrix products) happens as in a run; in place of the kernel, an op without effect shows its tensors to the
trace. So a trace makes the allocations of a real run, can estimate how long the kernel takes, and needs
neither a GPU nor Triton.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oomph.torch_internals import FakeTensor

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class Kernels:
    """The Triton kernels of one module, which is imported when the first of them is launched on real data."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._imported: dict[str, Any] = {}

    def launch(
        self,
        name: str,
        grid: Grid,
        *arguments: Any,
        flops: float = 0.0,
        passes: float = 1.0,
        efficiency: float = 0.0,
        **constants: Any,
    ) -> None:
        """Launch kernel `name` on the device of its first argument; on fake tensors, show it to the trace.

        Arguments that the kernel will not read, given its constants, may be None. For predictions of its
        time: `flops` of its matrix products; their `efficiency` as a share of the GPU's nominal rate, where
        it was measured; the number of `passes` over its tensors, below 1 where it reads a part of them.
        """
        tensor = arguments[0]
        if isinstance(tensor, FakeTensor):
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            costs = float(flops), float(passes), float(efficiency)
            _kernel_op()(tensors, f"{self._module}.{name}", *costs)
            return
        kernel = self._imported.get(name)
        if kernel is None:
            kernel = self._imported[name] = getattr(importlib.import_module(self._module), name)
        # Triton launches kernels on the current device, which may not be that of the tensors.
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            with torch.cuda.device(tensor.device):
                kernel[grid](*arguments, **constants)
        else:
            kernel[grid](*arguments, **constants)


@functools.cache
def _kernel_op() -> Callable[..., None]:
    """oomph::kernel, an op without effect or result, which a trace sees as it sees every op."""
    library = torch.library.Library("oomph", "FRAGMENT")
    library.define("kernel(Tensor[] tensors, str name, float flops, float passes, float efficiency) -> ()")
    library.impl("kernel", lambda *arguments: None, "CompositeExplicitAutograd")
    _libraries.append(library)
    op: Callable[..., None] = torch.ops.oomph.kernel.default
    return op


_libraries: list[torch.library.Library] = []  # an op lives as long as the library that defines it


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a shape but no data, as in a prediction."""
    return isinstance(tensor, FakeTensor)


def why_not_triton(tensor: Tensor) -> str | None:
    """Why kernels cannot run on this tensor; None where they can."""
    if is_fake(tensor):
        return None if tensor.device.type == "cuda" else f"the tensors are on {tensor.device.type}"
    if not _triton_is_installed():
        return "Triton is not installed (pip install 'oomph[kernels]')"
    if tensor.device.type == "cuda" or interpreted():
        return None
    return f"the tensors are on {tensor.device.type}"


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU. Slow; for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
