"""Strong decay, neutral tokens, long sequences, precision."""

import pytest
import torch
from kda_inputs import assert_close, inputs, outcome, relative_error

from oomph.ops.delta_attention import kda
from oomph.ops.delta_attention.chunked import CHUNK
from oomph.ops.delta_attention.reference import reference


def in_double(given):
    return {name: x.double() for name, x in given.items()}


@pytest.mark.parametrize("decay", ["all", "some tokens", "some channels"])
@pytest.mark.parametrize("mode", ["chunked", "sequential", "scan"])
def test_a_log_decay_of_20_per_token_is_finite_and_right_in_float32(decay, mode):
    given = inputs(2, 3 * CHUNK, 2, 8, 8, decay=0.01, dtype=torch.float32)
    strong = {
        "all": ...,
        "some tokens": (slice(None), slice(None, None, 3)),
        "some channels": (..., slice(0, 4)),
    }
    given["log_alpha"][strong[decay]] = -20.0
    assert_close(outcome(kda, given, mode=mode), outcome(reference, in_double(given)), 2e-6)


def test_the_gradient_of_a_strong_decay_is_right_by_itself_in_float32():
    # It is exp(-20) of its neighbours': a difference of running sums would leave noise.
    given = inputs(1, 3 * CHUNK, 2, 8, 8, decay=0.01, dtype=torch.float32)
    given["log_alpha"][:, ::7] = -20.0
    found = outcome(kda, given, mode="chunked")["grad of log_alpha"][:, ::7]
    right = outcome(reference, in_double(given))["grad of log_alpha"][:, ::7]
    assert relative_error(found, right) < 1e-5


def test_a_decay_to_nothing_forgets_the_state_exactly():
    given = inputs(1, 40, 1, 4, 4)
    given["log_alpha"][:, 20] = -torch.inf
    late = {name: x[:, 20:] for name, x in given.items() if name != "initial_state"}
    o, state = kda(**given, mode="chunked")
    fresh_o, fresh_state = kda(**late, mode="chunked")
    torch.testing.assert_close(o[:, 20:], fresh_o)
    torch.testing.assert_close(state, fresh_state)


@pytest.mark.parametrize("mode", ["chunked", "sequential"])
@pytest.mark.parametrize("active", [0, 1, CHUNK - 5, CHUNK, CHUNK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neutral_tokens_leave_the_state_untouched_to_the_bit(mode, active, dtype):
    given = inputs(2, 3 * CHUNK + 3, 2, 8, 6, dtype=dtype)
    given["log_alpha"][:, active:] = 0
    given["beta"][:, active:] = 0
    o, state = kda(**given, mode=mode)
    only = {name: x if name == "initial_state" else x[:, :active] for name, x in given.items()}
    right = kda(**only, mode=mode)[1]
    assert torch.equal(state, right)
    answers = torch.einsum("bthk,bhkv->bthv", given["q"][:, active:], right) * 8**-0.5
    torch.testing.assert_close(o[:, active:], answers)


def test_neutral_tokens_take_gradients_like_any_other():
    given = inputs(1, 2 * CHUNK)
    given["log_alpha"][:, 5:20] = 0
    given["beta"][:, 5:20] = 0
    assert_close(outcome(kda, given, mode="chunked"), outcome(reference, given), 1e-13)


def test_65536_tokens_in_float32_are_those_of_the_sequential_form_on_slices():
    tokens, width = 65_536, 64
    given = inputs(1, tokens, 1, 8, 8, decay=0.02, dtype=torch.float32)
    whole, final = kda(**given, mode="chunked")
    # The state at a slice's start, in float64 and by cutting there; then the slice token by token.
    for start in (0, 20_001, tokens - width):
        before = {n: x if n == "initial_state" else x[:, :start] for n, x in given.items()}
        state = kda(**in_double(before), mode="chunked")[1].float()
        part = {n: x[:, start : start + width] for n, x in given.items() if n != "initial_state"}
        o, last = kda(**part, initial_state=state, mode="sequential")
        assert relative_error(whole[:, start : start + width], o) < 1e-5
    assert relative_error(final, last) < 1e-5


def test_the_error_in_float32_is_no_larger_than_the_sequential_forms():
    given = inputs(2, 300, 2, 16, 16, dtype=torch.float32)
    right = outcome(reference, in_double(given))
    ours, naive = outcome(kda, given, mode="chunked"), outcome(kda, given, mode="sequential")
    for name in right:
        assert relative_error(ours[name], right[name]) <= 2 * relative_error(naive[name], right[name]) + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["chunked", "sequential"])
def test_half_precision_inputs_keep_a_float32_state(dtype, mode):
    given = inputs(2, 70, dtype=torch.float32)
    for name in ("q", "k", "v"):
        given[name] = given[name].to(dtype)
    found = outcome(kda, given, mode=mode)
    assert found["o"].dtype == dtype
    assert found["state"].dtype == torch.float32
    assert {found[f"grad of {name}"].dtype for name in ("q", "k", "v")} == {dtype}
    assert found["grad of log_alpha"].dtype == found["grad of beta"].dtype == torch.float32
    right = outcome(reference, in_double(given))
    assert relative_error(found["state"], right["state"]) < 1e-6
    assert_close(found, right, 8e-3 if dtype == torch.bfloat16 else 1e-3)


def test_one_float64_input_makes_all_arithmetic_float64():
    given = inputs(1, 40, dtype=torch.float32)
    given["log_alpha"], given["initial_state"] = given["log_alpha"].double(), given["initial_state"].double()
    state = kda(**given)[1]
    assert state.dtype == torch.float64
    assert relative_error(state, reference(**in_double(given))[1]) < 1e-14


@pytest.mark.parametrize("mode", ["chunked", "sequential", "scan"])
def test_nan_reaches_the_tokens_that_read_it_and_no_earlier_chunk(mode):
    given = inputs(1, 2 * CHUNK, 1, 4, 4)
    given["v"][0, CHUNK + 3, 0, 2] = torch.nan
    o, state = kda(**given, mode=mode)
    assert not o[:, :CHUNK].isnan().any()  # within the chunk, 0 * NaN is NaN
    assert o[:, CHUNK + 3 :, :, 2].isnan().all()
    assert state[..., 2].isnan().all()
