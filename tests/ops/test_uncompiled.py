"""What torch.compile steps around runs as it is, whether a program is compiled or not."""

from __future__ import annotations

import traceback

import pytest
import torch

from oomph.ops.common import no_compile


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
