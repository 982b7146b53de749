"""kda as part of a program: autograd, compile, checkpoint, autocast; and what is chosen."""

import importlib.util
import logging

import pytest
import torch
from kda_inputs import NAMES, assert_close, ends, inputs, outcome, relative_error

import oomph
from oomph.errors import ArgumentError
from oomph.ops.common import explain
from oomph.ops.delta_attention import kda


def leaves(given):
    return {name: x.clone().requires_grad_() for name, x in given.items()}


@pytest.mark.parametrize("trained", [*NAMES, "v beta", "log_alpha"])
def test_frozen_inputs_get_no_gradient_and_the_others_the_same(trained):
    given = inputs(2, 70)
    right = outcome(kda, given, mode="chunked")
    some = {name: x.clone().requires_grad_(name in trained.split()) for name, x in given.items()}
    o, state = kda(**some, mode="chunked")
    make = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, generator=make, dtype=torch.float64) for x in (o, state)]
    ((o * weights[0]).sum() + (state * weights[1]).sum()).backward()
    for name, x in some.items():
        if name in trained.split():
            assert torch.equal(x.grad, right[f"grad of {name}"])
        else:
            assert x.grad is None


@pytest.mark.parametrize("result", [0, 1])
def test_one_of_the_two_results_may_go_unused(result):
    given = inputs(1, 70)
    found, right = leaves(given), leaves(given)
    kda(**found, mode="chunked")[result].sum().backward()
    kda(**right, mode="sequential")[result].sum().backward()
    for name in NAMES:
        expected = right[name].grad
        if expected is None:  # q, where only the state is used
            assert not found[name].grad.any()
        else:
            torch.testing.assert_close(found[name].grad, expected)


def test_backward_runs_twice_with_retain_graph():
    given = leaves(inputs(1, 70))
    total = kda(**given, mode="chunked")[0].sum()
    total.backward(retain_graph=True)
    once = {name: x.grad.clone() for name, x in given.items()}
    total.backward()
    assert all(torch.equal(given[name].grad, 2 * once[name]) for name in given)


def test_the_inputs_and_the_state_are_left_as_they_were():
    given = inputs(2, 70)
    copies = {name: x.clone() for name, x in given.items()}
    outcome(kda, given, mode="chunked")
    with torch.no_grad():
        kda(**given)
    assert all(torch.equal(given[name], copies[name]) for name in given)


def test_without_gradients_nothing_is_kept_and_the_result_is_the_same():
    given = leaves(inputs(2, 70))
    with_gradients = kda(**given, mode="chunked")
    with torch.no_grad():
        without = kda(**given, mode="chunked")
    assert all(not x.requires_grad for x in without)
    assert all(torch.equal(a, b) for a, b in zip(with_gradients, without, strict=True))


def test_only_the_inputs_and_the_states_between_segments_are_saved():
    given = leaves(inputs(2, 200, 3, 4, 6))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kda(**given, mode="chunked", memory_chunk_size=64)
    places = {x.data_ptr() for x in given.values()}
    assert [tuple(x.shape) for x in kept if x.data_ptr() not in places] == [(3 * 2, 3, 4, 6)]


def test_second_derivatives_are_refused_by_chunks_and_made_by_the_sequential_form():
    given = leaves(inputs(1, 5))
    o = kda(**given, mode="chunked")[0]
    with pytest.raises(ArgumentError, match="twice"):
        torch.autograd.grad(o.sum(), given["k"], create_graph=True)
    (grad,) = torch.autograd.grad(kda(**given, mode="sequential")[0].sum(), given["k"], create_graph=True)
    grad.sum().backward()
    assert given["v"].grad.abs().sum() > 0


def test_non_contiguous_inputs_and_gradients_are_read_as_they_are():
    given = inputs(2, 70)

    def strided(**plain):
        views = {name: x.transpose(-1, -2).contiguous().transpose(-1, -2) for name, x in plain.items()}
        o, state = kda(**views, mode="chunked")
        return o.flip(1).flip(1).transpose(1, 2).transpose(1, 2), state

    assert_close(outcome(strided, given), outcome(kda, given, mode="chunked"), 1e-14)


def test_checkpointing_gives_the_same_gradients():
    def checkpointed(**given):
        return torch.utils.checkpoint.checkpoint(lambda: kda(**given, mode="chunked"), use_reentrant=False)

    given = inputs(1, 70)
    assert_close(outcome(checkpointed, given), outcome(kda, given, mode="chunked"), 1e-15)


def test_a_compiled_program_gives_the_same():
    compiled = torch.compile(lambda **given: kda(**given, mode="chunked"), backend="eager")
    given = inputs(1, 40)
    assert_close(outcome(compiled, given), outcome(kda, given, mode="chunked"), 1e-15)


def test_under_autocast_the_output_is_half_precision_and_the_state_is_not():
    given = inputs(2, 70, dtype=torch.float32)
    given["q"] = given["q"].bfloat16()  # as a linear layer leaves it; k, v from float32 normalisation
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(kda, given, mode="chunked")
    assert found["o"].dtype == torch.bfloat16
    assert found["state"].dtype == torch.float32
    rounded = {n: x.bfloat16() if n in ("q", "k", "v") else x for n, x in given.items()}
    assert relative_error(found["state"], outcome(kda, rounded, mode="chunked")["state"]) < 1e-6
    assert found["grad of k"].dtype == torch.float32


@pytest.mark.parametrize("mode", ["auto", "chunked", "sequential", "scan"])
@pytest.mark.parametrize("empty", ["tokens", "batch", "heads"])
def test_nothing_in_gives_nothing_out_and_passes_the_state_on(mode, empty):
    sizes = {"batch": 2, "tokens": 5, "heads": 2, empty: 0}
    given = leaves(inputs(**sizes))
    o, state = kda(**given, mode=mode)
    assert o.shape == given["v"].shape
    assert torch.equal(state, given["initial_state"])
    (o.sum() + 3 * state.sum()).backward()
    assert (given["initial_state"].grad == 3).all()
    assert kda(*(given[name] for name in NAMES[:5]))[1].sum() == 0


def test_no_tokens_packed_pass_their_states_on():
    given = inputs(1, 0, states=3)
    o, state = kda(**given, cu_seqlens=[0, 0, 0, 0])
    assert o.numel() == 0
    assert torch.equal(state, given["initial_state"])


# What is chosen


def test_auto_goes_token_by_token_for_one_token_and_in_chunks_otherwise():
    def chosen(tokens, gradients=False, **options):
        given = {name: x.requires_grad_(gradients) for name, x in inputs(1, tokens).items()}
        return explain(kda, **given, **options)

    assert chosen(1, gradients=True).settings == {"mode": "sequential"}
    assert chosen(1).reason == "one token"
    assert chosen(3).settings["mode"] == "sequential"
    assert chosen(3).reason == "3 tokens without gradients"
    assert chosen(3, gradients=True).settings["mode"] == "chunked"
    many = chosen(100)
    assert many.impl == "torch"
    assert many.settings["mode"] == "chunked"
    assert many.reason.startswith("no kernel (")
    assert chosen(1, mode="chunked").settings["mode"] == "chunked"


def test_on_a_gpu_auto_takes_the_kernels_where_they_apply():
    chosen = {}

    def program():
        for name, dtype, size in (
            ("plain", torch.bfloat16, 64),
            ("wide", torch.float64, 64),
            ("large", torch.float32, 300),
        ):
            x = torch.zeros(1, 100, 2, size, device="cuda", dtype=dtype)
            chosen[name] = explain(kda, x, x, x, x, x[..., 0])

    oomph.predict(program, gpu="h200")
    assert chosen["plain"].impl == "triton"
    assert chosen["plain"].reason == "kernels on the GPU"
    assert chosen["wide"].impl == "torch"
    assert "float64" in chosen["wide"].reason
    assert "head size above 256" in chosen["large"].reason


def test_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO, "oomph.ops"):
        kda(*(inputs(1, 6, keys=3, seed=5)[name] for name in NAMES[:5]), mode="scan")
    assert "kda: torch (asked for)" in caplog.text


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that the interpreter throws away
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("options", [{}, {"memory_chunk_size": 32}, {"memory_budget": "1KiB"}])
def test_the_kernels_are_reached_through_the_same_function(options):
    lengths = [3, 37]
    given = inputs(1, 40, 1, 16, 16, states=2, dtype=torch.float32)
    found = outcome(kda, given, impl="triton", cu_seqlens=ends(lengths), **options)
    right = outcome(kda, {name: x.double() for name, x in given.items()}, cu_seqlens=ends(lengths))
    assert_close(found, right, 5e-6)
