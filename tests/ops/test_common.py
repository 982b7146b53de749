"""Shared helpers: kernel launches on fake tensors, logged choices, and no_compile."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomph.ops.common import Choice, Kernels, log_choice, no_compile

KERNELS = Kernels("a.module.that.does.not.exist")


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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


@no_compile
def never_traced(x):
    assert not torch.compiler.is_compiling()
    return x + 1


@no_compile
def also_never_traced(x):
    assert not torch.compiler.is_compiling()
    return inside(x)


def inside(x):
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


def test_a_choice_is_logged_once(caplog):
    reason = f"a reason that no other test gives: {id(caplog)}"
    with caplog.at_level(logging.INFO, logger="oomph.ops"):
        for _ in range(2):
            log_choice("an op", Choice("chunked", reason))
    assert caplog.messages == [f"an op: chunked ({reason})"]
