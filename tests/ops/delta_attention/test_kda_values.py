"""kda against the token-by-token reference in float64: values and the gradients of every input."""

import pytest
import torch
from checks import relative_error
from kda_inputs import assert_close, boundaries, half, in_double, inputs, one_by_one, outcome, relative_errors
from kernel_device import DEVICE

from oomph.ops.delta_attention import kda
from oomph.ops.delta_attention.chunked import CHUNK
from oomph.ops.delta_attention.reference import kda_reference

MODES = ["chunked", "sequential", "scan"]
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # Triton's interpreter computes masked lanes too, and numpy warns of them.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def matrix_recurrence(q, k, v, log_alpha, beta, state, scale):
    """One head, with explicit transition matrices."""
    outputs = []
    for t in range(q.shape[0]):
        a = log_alpha[t].exp()
        transition = torch.diag(a) - beta[t] * torch.outer(k[t], a * k[t])
        state = transition @ state + beta[t] * torch.outer(k[t], v[t])
        outputs.append(scale * state.T @ q[t])
    return torch.stack(outputs), state


def test_reference_is_the_matrix_recurrence_of_every_head():
    given = inputs(2, 9, 3, 4, 6)
    for o, state in (kda_reference(**given, scale=0.7), kda(**given, scale=0.7, impl="reference")):
        for b in range(2):
            for h in range(3):
                rows = [given[name][b, :, h] for name in ("q", "k", "v", "log_alpha", "beta")]
                right_o, right_state = matrix_recurrence(*rows, given["initial_state"][b, h], 0.7)
                torch.testing.assert_close(o[b, :, h], right_o)
                torch.testing.assert_close(state[b, h], right_state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "decay"),
    [((2, 37, 2, 5, 7), 1.0), ((1, 1, 1, 1, 1), 1.0), ((2, 3, 1, 16, 3), 20.0), ((1, 127, 2, 3, 4), 0.1)],
)
def test_every_mode_matches_the_reference(mode, shape, decay):
    given = inputs(*shape, decay=decay)
    assert_close(outcome(kda, given, mode=mode), outcome(kda_reference, given), 1e-13)


@pytest.mark.parametrize("lengths", [None, [35, 0, 62]])
def test_one_segment_and_several_give_the_same_gradients(lengths):
    tokens = 90 if lengths is None else sum(lengths)
    given = inputs(1, tokens, 2, 64, 64, states=None if lengths is None else len(lengths), decay=3.0)
    options = {} if lengths is None else {"cu_seqlens": boundaries(lengths)}
    found = outcome(kda, given, mode="chunked", **options)
    assert_close(found, outcome(kda, given, mode="chunked", memory_chunk_size=32, **options), 1e-14)
    run = kda_reference if lengths is None else one_by_one(kda_reference, lengths)
    assert_close(found, outcome(run, given), 1e-13)


@pytest.mark.parametrize("size", [None, 4 * CHUNK])
def test_packed_sequences_of_many_lengths_match_the_reference(size):
    lengths = [5, 70, 0, CHUNK + 1, 1, 2 * CHUNK, 200, 0, 33]
    given = inputs(1, sum(lengths), states=len(lengths))
    found = outcome(kda, given, mode="chunked", cu_seqlens=boundaries(lengths), memory_chunk_size=size)
    assert_close(found, outcome(one_by_one(kda_reference, lengths), given), 1e-13)


@pytest.mark.parametrize("cut", [1, CHUNK, CHUNK + 3])
def test_gradients_flow_through_a_state_passed_on(cut):
    def in_two(initial_state, **given):
        first = {name: x[:, :cut] for name, x in given.items()}
        second = {name: x[:, cut:] for name, x in given.items()}
        o1, state = kda(**first, initial_state=initial_state, mode="chunked")
        o2, state = kda(**second, initial_state=state, mode="chunked")
        return torch.cat((o1, o2), 1), state

    given = inputs(2, 2 * CHUNK + 9)
    assert_close(outcome(in_two, given), outcome(kda, given, mode="chunked"), 1e-13)


# Decay


@pytest.mark.parametrize("where", ["all", "some tokens", "some channels"])
@pytest.mark.parametrize("mode", MODES)
def test_a_log_decay_of_20_per_token_in_float32(where, mode):
    given = inputs(2, 3 * CHUNK, 2, 8, 8, decay=0.01, dtype=torch.float32)
    strong = {
        "all": ...,
        "some tokens": (slice(None), slice(None, None, 3)),
        "some channels": (..., slice(0, 4)),
    }
    given["log_alpha"][strong[where]] = -20.0
    assert_close(outcome(kda, given, mode=mode), outcome(kda_reference, in_double(given)), 2e-6)


def test_the_gradient_of_a_strong_decay_alone_in_float32():
    # It is exp(-20) of its neighbours': a difference of running sums would leave noise.
    given = inputs(1, 3 * CHUNK, 2, 8, 8, decay=0.01, dtype=torch.float32)
    given["log_alpha"][:, ::7] = -20.0
    found = outcome(kda, given, mode="chunked")["grad of log_alpha"][:, ::7]
    right = outcome(kda_reference, in_double(given))["grad of log_alpha"][:, ::7]
    assert relative_error(found, right) < 1e-5


def run(mode, given, **options):
    """Kernels, in float32 on a GPU or in the interpreter, where the mode is "triton"."""
    if mode == "triton":
        on_device = {name: x.to(DEVICE, torch.float32) for name, x in given.items()}
        return tuple(x.cpu() for x in kda(**on_device, impl="triton", **options))
    return kda(**given, mode=mode, **options)


with_kernels = pytest.mark.parametrize("mode", ["chunked", "triton"])


@with_kernels
def test_a_log_decay_of_minus_infinity_resets_the_state(mode):
    given = inputs(1, 40, 1, 16, 16)
    given["log_alpha"][:, 20] = -torch.inf
    late = {name: x[:, 20:] for name, x in given.items() if name != "initial_state"}
    (o, state), (late_o, late_state) = run(mode, given), run(mode, late)
    torch.testing.assert_close(o[:, 20:], late_o)
    torch.testing.assert_close(state, late_state)


@pytest.mark.parametrize("mode", ["chunked", "sequential", "triton"])
@pytest.mark.parametrize("active", [0, CHUNK + 5])
def test_neutral_tokens_leave_the_state_bitwise_unchanged(mode, active):
    given = inputs(1, 2 * CHUNK + 3, 1, 16, 16, dtype=torch.float32)
    given["log_alpha"][:, active:] = 0
    given["beta"][:, active:] = 0
    o, state = run(mode, given)
    only = {name: x if name == "initial_state" else x[:, :active] for name, x in given.items()}
    right = run(mode, only)[1]
    assert torch.equal(state, right)
    reads = torch.einsum("bthk,bhkv->bthv", given["q"][:, active:], right) * 16**-0.5
    torch.testing.assert_close(o[:, active:], reads, rtol=1e-5, atol=1e-5)


# Precision


def test_32768_tokens_in_float32():
    tokens, width = 32_768, 64
    given = inputs(1, tokens, 1, 8, 8, decay=0.02, dtype=torch.float32)
    whole, final = kda(**given, mode="chunked")
    before = {n: x if n == "initial_state" else x[:, : tokens - width] for n, x in given.items()}
    state = kda(**in_double(before), mode="chunked")[1].float()
    part = {n: x[:, tokens - width :] for n, x in given.items() if n != "initial_state"}
    o, last = kda(**part, initial_state=state, mode="sequential")
    assert relative_error(whole[:, tokens - width :], o) < 1e-5
    assert relative_error(final, last) < 1e-5


def test_float32_error_is_that_of_the_sequential_form():
    given = inputs(2, 300, 2, 16, 16, dtype=torch.float32)
    right = outcome(kda_reference, in_double(given))
    ours, naive = outcome(kda, given, mode="chunked"), outcome(kda, given, mode="sequential")
    for name, error in relative_errors(ours, right).items():
        assert error <= 2 * relative_error(naive[name], right[name]) + 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["chunked", "sequential"])
def test_half_precision_is_rounded_once(dtype, mode):
    """Every result and gradient within the rounding error of its own dtype, 2^-8 for bfloat16."""
    given = half(inputs(1, 300, 2, 32, 32, dtype=torch.float32), dtype, "q", "k", "v", "log_alpha", "beta")
    found = outcome(kda, given, mode=mode)
    assert found["state"].dtype == torch.float32
    assert {x.dtype for name, x in found.items() if "state" not in name} == {dtype}
    right = outcome(kda_reference, in_double(given))
    assert_close(found, right, torch.finfo(dtype).eps / 2)
    assert relative_error(found["state"], right["state"]) < 1e-6


def test_one_float64_input_makes_all_arithmetic_float64():
    given = inputs(1, 40, dtype=torch.float32)
    given["log_alpha"], given["initial_state"] = given["log_alpha"].double(), given["initial_state"].double()
    state = kda(**given)[1]
    assert state.dtype == torch.float64
    assert relative_error(state, kda_reference(**in_double(given))[1]) < 1e-14


@pytest.mark.parametrize("mode", [*MODES, "triton"])
def test_nan_reaches_later_tokens_and_no_earlier_chunk(mode):
    given = inputs(1, 2 * CHUNK, 1, 16, 16)
    given["v"][0, CHUNK + 3, 0, 2] = torch.nan
    o, state = run(mode, given)
    assert not o[:, :CHUNK].isnan().any()  # within the chunk, 0 * NaN is NaN
    assert o[:, CHUNK + 3 :, :, 2].isnan().all()
    assert state[..., 2].isnan().all()
