"""Memory, through oomph.predict: flat in the length, bounded by what was asked for; and the dense form's."""

import pytest
import torch
from kda_inputs import inputs

import oomph
from oomph.ops.delta_attention import kda, precompute_updates
from oomph.ops.delta_attention.buffers import Buffers
from oomph.ops.delta_attention.segments import Costs, plan_packed, tokens_per_segment
from oomph.units import KiB, MiB

HEADS, SIZE = 16, 32
TOKEN = HEADS * SIZE * 4  # bytes of o, per token
STATE = HEADS * SIZE * SIZE * 4


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
    short, long = (predicted((1, t, HEADS, SIZE), impl="torch", memory_chunk_size=64) for t in (128, 384))
    more = 384 - 128
    assert long - short <= more * TOKEN + more // 64 * STATE + 8 * KiB


def test_smaller_segments_take_less():
    peaks = [predicted((1, 256, HEADS, SIZE), impl="torch", memory_chunk_size=n) for n in (64, 128, 256)]
    assert peaks[0] < 0.7 * peaks[1] < 0.5 * peaks[2]


@pytest.mark.parametrize(("size", "budget"), [(16, 6), (32, 6), (32, 12), (64, 24)])
def test_a_budget_is_kept_and_used(size, budget):
    results = 512 * HEADS * size * 4 + HEADS * size * size * 4
    within = predicted((1, 512, HEADS, size), impl="torch", memory_budget=f"{budget}MiB") - results
    assert 0.4 * budget * MiB <= within <= budget * MiB


def test_without_gradients_forward_keeps_no_states():
    many, few = (
        predicted((1, t, HEADS, SIZE), False, impl="torch", memory_chunk_size=32) for t in (256, 128)
    )
    assert many - few <= 128 * TOKEN + KiB


def test_packed_sequences_stay_within_the_segment_too():
    # All of one token: every one of them fills a chunk.
    plan = plan_packed([1] * 100, chunk=32, per_segment=128)
    assert max(sum(segment.widths) for segment in plan.segments) == 4
    assert plan.saved == 0


def test_the_dense_form_of_report_000_needs_2_gib_where_chunks_need_little():
    shape = (16, 256, 8, 64)
    dense = predicted(shape, backward=False, mode="scan", memory_chunk_size=256)
    in_parts = predicted(shape, backward=False, mode="scan")
    ours = predicted(shape, impl="torch", memory_chunk_size=32)
    assert dense >= 2048 * MiB
    assert in_parts >= 0.5 * dense  # not a fourth, as the report has it
    assert ours < 128 * MiB


def test_chunks_of_precompute_updates_save_nothing_of_what_training_keeps():
    def peak(size):
        def target():
            k, v, log_alpha = (torch.rand(4, 128, 4, 32, device="cuda", requires_grad=True) for _ in range(3))
            beta = torch.rand(4, 128, 4, device="cuda")
            return precompute_updates(k, v, log_alpha, beta, memory_chunk_size=size) and None

        return oomph.predict(target, gpu="h200").peak.allocated

    assert peak(32) >= 0.95 * peak(None)


# What forward keeps for backward


def saved_bytes(tokens=64, size=64, dtype=torch.float32, **options):
    """Of the intermediate results that autograd holds, beside the inputs, in multiples of these."""
    given = {n: x for n, x in inputs(1, tokens, 2, size, size, dtype=dtype).items() if n != "initial_state"}
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    theirs = {x.untyped_storage().data_ptr(): x.nbytes for x in leaves.values()}
    found = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in theirs:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kda(**leaves, mode="chunked", **options)
    return sum(found.values()) / sum(theirs.values())


def test_a_call_of_one_segment_keeps_no_more_than_its_inputs_take():
    assert 0.5 < saved_bytes() <= 1.0
    assert saved_bytes(size=128) < saved_bytes()


def test_what_would_take_more_than_the_inputs_is_made_again():
    assert saved_bytes(size=16) == 0
    assert saved_bytes(dtype=torch.bfloat16) == 0


def test_with_several_segments_only_states_are_kept():
    # Two states between three segments.
    state, token = 64 * 64, 4 * 64 + 1
    assert saved_bytes(tokens=96, memory_chunk_size=32) == pytest.approx(2 * state / (96 * token))


def test_segments_that_grow_take_the_memory_of_the_largest():
    buffers = Buffers(torch.empty(0), torch.float32)
    for chunks in (1, 4, 2):
        buffers.begin(chunks)
        first, second = buffers.new(chunks, 16), buffers.new(chunks, 32)
        buffers.free(first)
        third = buffers.new(chunks, 16)
        assert second.shape == (chunks, 32)
        assert first.data_ptr() == third.data_ptr() != second.data_ptr()


def test_freed_memory_is_joined_and_divided():
    buffers = Buffers(torch.empty(0), torch.float32)
    buffers.begin(1)
    whole = buffers.new(64)
    place = whole.data_ptr()
    buffers.free(whole)
    parts = [buffers.new(16) for _ in range(4)]
    assert sorted(x.data_ptr() - place for x in parts) == [0, 64, 128, 192]
    buffers.free(parts[0], parts[2], parts[3], parts[1])
    assert buffers.new(64).data_ptr() == place


# The plan


def test_the_budget_decides_the_segments_and_the_least_is_taken_where_none_fits():
    costs = Costs(per_token=100, fixed=1000, states=2000)

    def length(budget=None, asked=None):
        return tokens_per_segment(1000, 10, costs, asked, budget, default=300)

    assert length() == 300
    assert length(asked=1) == 10
    assert length(asked=5000) == 5000
    assert length(budget=10**6) == 1000
    assert length(budget=60_000) == 500
    chosen = length(budget=1)
    assert costs.total(1000, chosen) == min(costs.total(1000, n) for n in range(10, 1010, 10))
