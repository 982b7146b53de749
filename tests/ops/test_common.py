"""Shared helpers: kernel launches on fake tensors, dtypes under autocast, and no_compile."""

from __future__ import annotations

import logging
import traceback
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.ops import common
from oomph.ops.common import Choice, Kernels, log_choice, matmul_dtype, no_autocast, no_compile

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


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_autocast_products_run_in_the_tensors_own_dtype(dtype: torch.dtype, device: str) -> None:
    assert matmul_dtype(torch.ones(2, dtype=dtype, device=device)) == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_decides_for_all_but_float64(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.float64 if dtype == torch.float64 else torch.bfloat16
        assert matmul_dtype(torch.ones(2, dtype=dtype)) == expected


def test_inside_no_autocast_a_product_keeps_its_dtype() -> None:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with no_autocast(x):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


def test_a_device_without_autocast_is_left_alone() -> None:
    with no_autocast(torch.ones(2, device="meta")):
        assert not torch.is_autocast_enabled("cpu")


@no_compile
def never_traced(x: torch.Tensor) -> torch.Tensor:
    assert not torch.compiler.is_compiling()
    return x + 1


@no_compile
def also_never_traced(x: torch.Tensor) -> torch.Tensor:
    assert not torch.compiler.is_compiling()
    return inside(x)


def inside(x: torch.Tensor) -> torch.Tensor:
    assert not torch.compiler.is_compiling()
    return x * 3


def test_a_compiled_program_steps_around_it_and_computes_the_same():
    x = torch.arange(3.0)
    program = torch.compile(lambda x: also_never_traced(never_traced(x * 2)) * 2, backend="eager")
    assert torch.equal(program(x), (x * 2 + 1) * 6)


@pytest.mark.filterwarnings("ignore:.*recompile_limit.*")
def test_it_is_left_alone_where_the_compiler_gave_up_on_its_caller():
    traced = []

    def backend(graph, inputs):
        traced.extend(node for node in graph.graph.nodes if node.op.startswith("call"))
        return graph.forward

    @no_compile
    def rows(x):
        return x * 3 + 1

    def program(x, number):
        return rows(x) if number >= 0 else x

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend)
    for number in range(2 * torch._dynamo.config.recompile_limit):
        assert torch.equal(compiled(torch.ones(number + 2), number), torch.full((number + 2,), 4.0))
    assert not traced


def test_without_a_compiler_it_is_the_function_itself():
    import torch._dynamo  # loaded, as optimizers do

    def called_from(x: torch.Tensor) -> torch.Tensor:
        assert not any("eval_frame" in frame.filename for frame in traceback.extract_stack())
        return x

    no_compile(called_from)(torch.ones(1))


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reason = f"a reason that no other test gives: {id(caplog)}"
    with caplog.at_level(logging.INFO, logger="oomph.ops"):
        for _ in range(2):
            log_choice("an op", Choice("chunked", reason))
    assert caplog.messages == [f"an op: chunked ({reason})"]


def test_numbers_are_finite_and_no_booleans() -> None:
    assert all(map(common.is_number, (0, -1.5, 10**18, 1e300)))
    assert not any(map(common.is_number, (True, float("nan"), float("inf"), 10**20, "1", None)))
