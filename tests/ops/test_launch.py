"""Starting kernels on tensors without data: nothing runs, and a trace is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.ops.launch import Kernels

KERNELS = Kernels("a.module.that.does.not.exist")


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.name(), args))
        return None


def test_a_kernel_on_fake_tensors_needs_neither_its_module_nor_a_trace():
    with FakeTensorMode():
        KERNELS.launch("kernel", (1,), torch.empty(4, requires_grad=True), None, 3, BLOCK=4)


def test_a_mode_sees_the_tensors_and_the_figures_of_a_kernel():
    with FakeTensorMode():
        x, y = torch.empty(4), torch.empty(2)
        with Seen() as seen:
            KERNELS.launch("kernel", (1,), x, None, y, 3, flops=8, passes=0.5, BLOCK=4)
    ((name, (tensors, kernel, flops, passes, efficiency)),) = seen.calls
    assert name.split(".")[0] == "oomph::kernel"
    assert tensors[0] is x
    assert tensors[1] is y
    assert (kernel, flops, passes, efficiency) == ("a.module.that.does.not.exist.kernel", 8.0, 0.5, 0.0)


def test_on_real_tensors_the_kernel_itself_is_looked_for():
    with pytest.raises(ModuleNotFoundError):
        KERNELS.launch("kernel", (1,), torch.empty(4), flops=1.0)
