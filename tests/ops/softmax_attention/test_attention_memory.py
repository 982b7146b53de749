"""Memory, through oomph.predict: which path a GPU takes, and that none grows with the length squared."""

import pytest
import torch

import oomph
from oomph.ops.common import explain
from oomph.ops.softmax_attention import attention, local, locality_bias
from oomph.ops.softmax_attention.flex import _causal_blocks
from oomph.units import MiB


def over_baseline(length, dtype=torch.bfloat16, batch=1, points=False, padded=False, key_heads=8, **options):
    """(bytes beyond q, k, v and the incoming gradient; what was chosen) for 8 heads of 64."""
    chosen = []

    def target():
        q, g = (torch.randn(batch, 8, length, 64, device="cuda", dtype=dtype) for _ in range(2))
        k, v = (torch.randn(batch, key_heads, length, 64, device="cuda", dtype=dtype) for _ in range(2))
        more = dict(options)
        if points:
            more["bias"] = locality_bias(*(torch.rand(length, 2, device="cuda") for _ in range(2)))
        if padded:
            more["key_lengths"] = torch.full((batch,), length // 2, device="cuda")
        for tensor in (q, k, v):
            tensor.requires_grad_()
        chosen.append(explain(attention, q, k, v, **more))

        def step():
            attention(q, k, v, **more).backward(g)
            q.grad = k.grad = v.grad = None

        return step

    peak = oomph.predict(target, gpu="h200").peak.allocated
    inputs = batch * length * 64 * (2 * 8 + 2 * key_heads) * dtype.itemsize
    return peak - inputs, chosen[0]


@pytest.mark.parametrize(
    ("options", "impl"),
    [
        ({}, "cudnn"),
        ({"causal": True}, "cudnn"),
        ({"key_heads": 2}, "cudnn"),
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float32, "key_heads": 2}, "efficient"),
        ({"padded": True}, "cudnn"),
        ({"padded": True, "dtype": torch.float32}, "efficient"),
        ({"padded": True, "causal": True}, "triton"),
        ({"points": True}, "triton"),
        ({"points": True, "padded": True, "pattern": local(1), "key_heads": 2}, "triton"),
        ({"points": True, "dtype": torch.float32}, "triton"),
        ({"bias": lambda b, h, i, j: -(i - j).abs()}, "flex"),
        ({"pattern": local(1), "causal": True}, "triton"),
        ({"pattern": local(1), "dtype": torch.float32, "key_heads": 2}, "triton"),
        ({"dtype": torch.float64, "memory_budget": "16MiB"}, "chunked"),
        ({"impl": "chunked", "points": True, "causal": True, "memory_budget": "24MiB"}, "chunked"),
        ({"impl": "chunked", "pattern": local(1), "memory_budget": "8MiB"}, "chunked"),
    ],
)
def test_memory_grows_no_faster_than_the_length(options, impl):
    length = 1024 if impl == "chunked" else 8192  # tile by tile a trace takes its time
    small, choice = over_baseline(length // 2, **options)
    large, _ = over_baseline(length, **options)
    assert choice.impl == impl
    # The coordinates and masks of a call are linear too; a score matrix would quadruple.
    assert large <= 2.05 * small
    assert impl == "chunked" or large < 8 * length * length  # a byte per score


def test_the_fused_kernels_take_what_was_measured_on_an_h200():
    assert over_baseline(1024, batch=64)[0] == pytest.approx(388 * MiB, rel=0.01)
    assert over_baseline(1024, batch=64, impl="flash")[0] == pytest.approx(516 * MiB, rel=0.01)
    assert over_baseline(1024, batch=64, dtype=torch.float32)[0] == pytest.approx(774 * MiB, rel=0.01)


def test_padding_and_bias_functions_take_what_was_measured_on_an_h200():
    assert over_baseline(1024, batch=64, padded=True)[0] == pytest.approx(388.1 * MiB, rel=0.001)
    for how in ("triton", "flex"):
        assert over_baseline(1024, batch=64, points=True, impl=how)[0] == pytest.approx(260 * MiB, rel=0.001)


def test_our_kernels_hold_the_result_and_one_number_per_row():
    # Forward: out 64 and lse 2 MiB; backward: delta 2, and three gradients of 64.
    assert over_baseline(1024, batch=64, padded=True, causal=True)[0] == pytest.approx(260 * MiB, rel=0.001)


def test_a_smaller_budget_takes_less_memory():
    wide, _ = over_baseline(2048, impl="chunked", memory_budget="256MiB")
    narrow, _ = over_baseline(2048, impl="chunked", memory_budget="32MiB")
    assert wide - narrow > 120 * MiB


def test_the_locality_bias_stays_within_the_bound_of_report_004():
    needed, choice = over_baseline(1024, batch=64, points=True)
    assert choice.impl == "triton"
    assert needed < 1.3 * 516 * MiB


# The block tables that FlexAttention is given


def dense(table, rows, columns):
    counts, numbers = (tensor[0, 0].tolist() for tensor in table)
    filled = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        filled[row, numbers[row][: counts[row]]] = True
    return filled


@pytest.mark.parametrize(("queries", "keys"), [(512, 512), (500, 500), (256, 512), (384, 256), (129, 300)])
def test_causal_block_tables_cover_exactly_the_allowed_pairs(queries, keys):
    made = _causal_blocks(queries, keys, torch.device("cpu"))
    rows, columns = -(-queries // 128), -(-keys // 128)
    allowed = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    partial, full = dense(made[0], rows, columns), dense(made[1], rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = allowed[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            assert bool(part.any()) == bool(partial[row, column] | full[row, column])
            assert not (partial[row, column] and full[row, column])
            if full[row, column]:
                assert part.shape == (128, 128)
                assert part.all()
    assert torch.equal(dense(made[2], columns, rows), partial.T)
    assert torch.equal(dense(made[3], columns, rows), full.T)
