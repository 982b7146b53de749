"""kda against the token-by-token reference in float64: values, and the gradients of every input."""

import pytest
import torch
from kda_inputs import assert_close, ends, inputs, outcome, packed, relative_error

from oomph.ops.delta_attention import kda, precompute_updates
from oomph.ops.delta_attention.chunked import BLOCK, CHUNK
from oomph.ops.delta_attention.reference import reference

FORMS = [{"mode": "chunked"}, {"mode": "sequential"}, {"mode": "scan"}, {"impl": "reference"}]


def by_hand(q, k, v, log_alpha, beta, state, scale):
    """Third opinion: the recurrence's matrix form of one head, written with explicit matrices."""
    outputs = []
    for t in range(q.shape[0]):
        a = log_alpha[t].exp()
        transition = torch.diag(a) - beta[t] * torch.outer(k[t], a * k[t])
        state = transition @ state + beta[t] * torch.outer(k[t], v[t])
        outputs.append(scale * state.T @ q[t])
    return torch.stack(outputs), state


def test_the_reference_is_the_matrix_recurrence_of_every_head():
    given = inputs(2, 9, 3, 4, 6)
    o, state = reference(**given, scale=0.7)
    for b in range(2):
        for h in range(3):
            rows = [given[name][b, :, h] for name in ("q", "k", "v", "log_alpha", "beta")]
            right_o, right_state = by_hand(*rows, given["initial_state"][b, h], 0.7)
            torch.testing.assert_close(o[b, :, h], right_o)
            torch.testing.assert_close(state[b, h], right_state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("shape", "decay"),
    [((2, 37, 2, 5, 7), 1.0), ((1, 1, 1, 1, 1), 1.0), ((2, 3, 1, 16, 3), 20.0), ((1, 127, 2, 3, 4), 0.1)],
)
def test_every_form_gives_the_reference_and_its_gradients(form, shape, decay):
    given = inputs(*shape, decay=decay)
    assert_close(outcome(kda, given, **form), outcome(reference, given), 1e-13)


SIZES = sorted({1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + BLOCK, 257})


@pytest.mark.parametrize("tokens", SIZES)
def test_chunks_are_exact_for_every_remainder_of_the_length(tokens):
    given = inputs(2, tokens, 2, 3, 4)
    assert_close(outcome(kda, given, mode="chunked"), outcome(reference, given), 1e-13)


@pytest.mark.parametrize(("keys", "values"), [(16, 256), (256, 16), (100, 64)])
def test_key_and_value_sizes_may_differ(keys, values):
    given = inputs(1, 40, 2, keys, values)
    assert_close(outcome(kda, given, mode="chunked"), outcome(reference, given), 1e-13)


# Heads of 64 and all tokens in one segment: backward finds much of its work done by forward.


@pytest.mark.parametrize("lengths", [None, [90], [35, 0, 62]])
def test_what_forward_kept_gives_the_same_gradients_as_what_is_made_again(lengths):
    tokens = 90 if lengths is None else sum(lengths)
    given = inputs(1, tokens, 2, 64, 64, states=None if lengths is None else len(lengths), decay=3.0)
    options = {} if lengths is None else {"cu_seqlens": ends(lengths)}
    found = outcome(kda, given, mode="chunked", **options)
    assert_close(found, outcome(kda, given, mode="chunked", memory_chunk_size=32, **options), 1e-14)
    assert_close(found, outcome(reference if lengths is None else packed(reference, lengths), given), 1e-13)


def test_what_was_kept_serves_a_second_backward():
    leaves = {name: x.requires_grad_() for name, x in inputs(1, 64, 1, 64, 64).items()}
    o, state = kda(**leaves, mode="chunked")
    first, second = (
        torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_memory_that_was_never_written_is_never_read():
    given = inputs(2, 2 * CHUNK + 5, 2, 64, 64)
    right = outcome(reference, given)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        for size in (None, CHUNK):
            assert_close(outcome(kda, given, mode="chunked", memory_chunk_size=size), right, 1e-13)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1, CHUNK, CHUNK + 1, 2 * CHUNK, 10_000])
def test_segments_change_nothing(size):
    given = inputs(2, 4 * CHUNK + 5, 2, 3, 4)
    found = outcome(kda, given, mode="chunked", memory_chunk_size=size)
    assert_close(found, outcome(reference, given), 1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [[3, 0, 40, 16, 1, 50], [1], [0, 0, 5, 0], [CHUNK, 2 * CHUNK, 7]])
def test_packed_sequences_are_each_as_alone(form, lengths):
    given = inputs(1, sum(lengths), 2, 3, 4, states=len(lengths))
    right = outcome(packed(reference, lengths), given)
    assert_close(outcome(kda, given, cu_seqlens=ends(lengths), **form), right, 1e-13)


@pytest.mark.parametrize("size", [1, CHUNK, 2 * CHUNK, 5 * CHUNK])
def test_segments_cut_packed_sequences_anywhere(size):
    lengths = [3, 5 * CHUNK + 1, 0, 2 * CHUNK, 1, 1, CHUNK - 1]
    given = inputs(1, sum(lengths), 1, 3, 4, states=len(lengths))
    found = outcome(kda, given, cu_seqlens=ends(lengths).tolist(), mode="chunked", memory_chunk_size=size)
    assert_close(found, outcome(packed(reference, lengths), given), 1e-13)


@pytest.mark.parametrize("mode", ["chunked", "sequential", "scan"])
def test_without_an_initial_state_it_is_zero(mode):
    given = inputs(2, 20)
    state = torch.zeros_like(given["initial_state"])
    without = {name: x for name, x in given.items() if name != "initial_state"}
    found, right = (
        outcome(kda, without, mode=mode),
        outcome(kda, {**without, "initial_state": state}, mode=mode),
    )
    right.pop("grad of initial_state")
    assert_close(found, right, 1e-15)


@pytest.mark.parametrize("cut", [1, 20, CHUNK, CHUNK + 3])
def test_a_sequence_may_be_cut_anywhere_and_gradients_flow_through_the_cut(cut):
    def in_two(initial_state, **given):
        first = {name: x[:, :cut] for name, x in given.items()}
        second = {name: x[:, cut:] for name, x in given.items()}
        o1, state = kda(**first, initial_state=initial_state, mode="chunked")
        o2, state = kda(**second, initial_state=state, mode="chunked")
        return torch.cat((o1, o2), 1), state

    given = inputs(2, 2 * CHUNK + 9)
    assert_close(outcome(in_two, given), outcome(kda, given, mode="chunked"), 1e-13)


def test_generation_token_by_token_from_a_state_equals_the_parallel_form():
    given = inputs(2, 70, dtype=torch.float32)
    state = given.pop("initial_state")
    start = kda(**{name: x[:, :40] for name, x in given.items()}, initial_state=state)[1]
    outputs = []
    with torch.no_grad():
        for t in range(40, 70):
            o, start = kda(**{name: x[:, t : t + 1] for name, x in given.items()}, initial_state=start)
            outputs.append(o)
    whole, final = kda(**given, initial_state=state)
    assert relative_error(torch.cat(outputs, 1), whole[:, 40:]) < 1e-6
    assert relative_error(start, final) < 1e-6


@pytest.mark.parametrize("mode", ["chunked", "sequential", "scan"])
def test_no_token_sees_a_later_one(mode):
    given = inputs(1, 50, 1, 4, 4)
    before = kda(**given, mode=mode)[0]
    for t in (0, BLOCK, CHUNK - 1, CHUNK, 49):
        changed = {name: x.clone() for name, x in given.items()}
        for name in ("q", "k", "v", "beta"):
            changed[name][:, t] *= 0.5
        changed["log_alpha"][:, t] -= 1
        after = kda(**changed, mode=mode)[0]
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).flatten(2).any(-1).all()


def test_the_dense_transitions_and_writes_make_the_same_recurrence_whatever_the_chunk():
    given = inputs(2, 33, 2, 4, 6)
    arguments = [given[name] for name in ("k", "v", "log_alpha", "beta")]
    whole = precompute_updates(*arguments, memory_chunk_size=None)
    parts = precompute_updates(*arguments, memory_chunk_size=8)
    assert [tuple(x.shape) for x in whole] == [(2, 33, 2, 4, 4), (2, 33, 2, 4, 6)]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    state = given["initial_state"]
    for t in range(33):
        state = whole[0][:, t] @ state + whole[1][:, t]
    torch.testing.assert_close(state, reference(**given)[1])
