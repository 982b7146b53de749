"""How Triton kernels are found and started: one place, so that a prediction sees what a run does.

A prediction runs the same Python code on tensors without data. Everything around a kernel (checks,
allocations, matrix products) then happens as in a run, and the kernel itself does nothing but tell the trace
what it would work on. So a trace makes exactly the allocations of a real run, can tell how long the kernel
takes, and needs neither a GPU nor Triton.
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
    """The Triton kernels of one module, imported when the first of them is started on real data."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._found: dict[str, Any] = {}

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
        """Start kernel `name` on the device of its first argument, or do nothing where that has no data.

        Arguments that the kernel will not read, given its constants, may be None. For predictions of its
        time: `flops` of its matrix products; the `efficiency` of these, as a share of the GPU's nominal rate,
        where it was measured; how often it `passes` over its tensors, below 1 for a part of them.
        """
        tensor = arguments[0]
        if isinstance(tensor, FakeTensor):
            tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
            figures = float(flops), float(passes), float(efficiency)
            _kernel_marker()(tensors, f"{self._module}.{name}", *figures)
            return
        kernel = self._found.get(name)
        if kernel is None:
            kernel = self._found[name] = getattr(importlib.import_module(self._module), name)
        # Triton starts kernels on the current device, which need not be the one the tensors are on.
        if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
            with torch.cuda.device(tensor.device):
                kernel[grid](*arguments, **constants)
        else:
            kernel[grid](*arguments, **constants)


@functools.cache
def _kernel_marker() -> Callable[..., None]:
    """An op without effect or result. A trace sees it, as it sees every op, and counts the kernel."""
    library = torch.library.Library("oomph", "FRAGMENT")
    library.define("kernel(Tensor[] tensors, str name, float flops, float passes, float efficiency) -> ()")
    library.impl("kernel", lambda *arguments: None, "CompositeExplicitAutograd")
    _libraries.append(library)
    op: Callable[..., None] = torch.ops.oomph.kernel.default
    return op


_libraries: list[torch.library.Library] = []  # an op lives as long as the library that defines it


def is_fake(tensor: Tensor) -> bool:
    """Has the tensor a shape but no data, as in a prediction?"""
    return isinstance(tensor, FakeTensor)


def why_not_triton(tensor: Tensor) -> str | None:
    """Why kernels cannot run on this tensor, in a few words; None where they can."""
    if is_fake(tensor):
        return None if tensor.device.type == "cuda" else f"the tensors are on {tensor.device.type}"
    if not _triton_is_installed():
        return "Triton is not installed (pip install 'oomph[kernels]')"
    if tensor.device.type == "cuda" or interpreted():
        return None
    return f"the tensors are on {tensor.device.type}"


def interpreted() -> bool:
    """Does Triton run kernels in its interpreter, on the CPU? Slow; for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
