"""Shared helpers: logged choices, and no_compile."""

import logging

import pytest
import torch

from oomph.ops.common import Choice, log_choice, no_compile


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
