"""kda as part of a program: arguments, choice, autograd, compile, checkpoint, autocast, memory."""

import pytest
import torch
from checks import relative_error, saved_beside
from kda_inputs import half, inputs, outcome

import oomph
from oomph.ops.common import explain
from oomph.ops.delta_attention import kda, precompute_updates
from oomph.units import KiB, MiB

# Choice ----------------------------------------------------------------------------------------------


def test_auto_is_sequential_for_few_tokens_and_chunked_otherwise():
    def chosen(tokens, gradients=False, **options):
        given = {name: x.requires_grad_(gradients) for name, x in inputs(1, tokens).items()}
        return explain(kda, **given, **options)

    assert chosen(1, gradients=True).settings == {"mode": "sequential"}
    assert chosen(3).settings["mode"] == "sequential"
    assert chosen(3, gradients=True).settings["mode"] == "chunked"
    assert chosen(100).impl == "torch"
    assert chosen(100).settings["mode"] == "chunked"
    assert chosen(100).reason
    assert chosen(1, mode="chunked").settings["mode"] == "chunked"


def test_auto_takes_the_kernels_on_a_gpu_where_they_apply():
    def program():
        for dtype, size, impl, reason in (
            (torch.bfloat16, 64, "triton", "kernels"),
            (torch.float64, 64, "torch", "float64"),
            (torch.float32, 300, "torch", "256"),
        ):
            x = torch.zeros(1, 100, 2, size, device="cuda", dtype=dtype)
            choice = explain(kda, x, x, x, x, x[..., 0])
            assert choice.impl == impl
            assert reason in choice.reason
        x = torch.ones(1, 32, 2, 16, device="cuda")
        kda(x, x, x, x, 5 * x[..., 0])  # a prediction has no values to check

    oomph.predict(program, gpu="h200")


# Autograd --------------------------------------------------------------------------------------------


def leaves(given):
    return {name: x.clone().requires_grad_() for name, x in given.items()}


@pytest.mark.parametrize("result", [0, 1])
def test_one_of_the_results_may_be_unused(result):
    found, right = (leaves(inputs(1, 70)) for _ in range(2))
    kda(**found, mode="chunked")[result].sum().backward()
    kda(**right, mode="sequential")[result].sum().backward()
    for name, each in found.items():
        expected = right[name].grad  # None for q, where only the state is used
        torch.testing.assert_close(each.grad, torch.zeros_like(each) if expected is None else expected)


def test_autocast_makes_the_output_half_precision_and_not_the_state():
    given = half(inputs(2, 70, dtype=torch.float32), torch.bfloat16, "q")
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(kda, given, mode="chunked")
    assert found["o"].dtype == torch.bfloat16
    assert found["state"].dtype == torch.float32
    assert found["grad of k"].dtype == torch.float32
    right = outcome(kda, half(given, torch.bfloat16), mode="chunked")
    assert relative_error(found["state"], right["state"]) < 1e-6


# Memory ----------------------------------------------------------------------------------------------

HEADS, SIZE = 16, 32


def predicted(shape, backward=True, **options):
    """Peak bytes beside the inputs, the gradient of o, and the inputs' gradients; without cuBLAS's own."""
    batch, tokens, heads, size = shape

    def program():
        def make(*last):
            return torch.randn(batch, tokens, heads, *last, device="cuda", requires_grad=backward)

        q, k, v, log_alpha, beta = make(size), make(size), make(size), make(size), make()
        o, _ = kda(q, k, v, log_alpha, beta, **options)
        if backward:
            o.backward(torch.empty_like(o))

    prediction = oomph.predict(program, gpu="h200")
    workspaces = sum(each.bytes for each in prediction.at_peak if each.allocation.op == "cublas workspace")
    rows = batch * tokens * heads * 4
    resident = rows * (9 * size + 2) if backward else rows * (4 * size + 1)
    return prediction.peak.allocated - workspaces - resident


def test_the_peak_is_that_of_one_segment_whatever_the_length():
    short, long, coarse = (
        predicted((1, tokens, HEADS, SIZE), impl="torch", memory_chunk_size=size)
        for tokens, size in ((64, 32), (96, 32), (96, 96))
    )
    out, state = 32 * HEADS * SIZE * 4, HEADS * SIZE * SIZE * 4
    assert long - short <= out + state + 8 * KiB
    assert long < 0.7 * coarse


def test_a_memory_budget_is_met_and_used():
    size, budget = 64, 12
    results = 128 * HEADS * size * 4 + HEADS * size * size * 4
    used = predicted((1, 128, HEADS, size), impl="torch", memory_budget=f"{budget}MiB") - results
    assert 0.4 * budget * MiB <= used <= budget * MiB


def test_chunks_of_precompute_updates_save_nothing_of_what_training_saves():
    def peak(size):
        def target():
            k, v, log_alpha = (torch.rand(4, 128, 4, 32, device="cuda", requires_grad=True) for _ in range(3))
            beta = torch.rand(4, 128, 4, device="cuda")
            return precompute_updates(k, v, log_alpha, beta, memory_chunk_size=size) and None

        return oomph.predict(target, gpu="h200").peak.allocated

    assert peak(32) >= 0.95 * peak(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_for_backward_are_the_states_between_segments(dtype):
    given = leaves(inputs(1, 96, 2, 64, 64, dtype=dtype))
    del given["initial_state"]
    assert saved_beside(given.values(), lambda: kda(**given, mode="chunked")) == []
    states = saved_beside(given.values(), lambda: kda(**given, mode="chunked", memory_chunk_size=32))
    assert [tuple(each.shape) for each in states] == [(1, 2, 64, 64)] * 2
