"""selective_scan with autograd, autocast, torch.compile and checkpointing; memory; empty and bad inputs."""

import pytest
import torch
from checks import saved_beside
from scan_inputs import inputs, results

import oomph
from oomph.ops.common import explain
from oomph.ops.state_space import chunked, selective_scan
from oomph.units import MiB


def leaves(dtype=torch.float64, **sizes):
    return {name: each.to(dtype).requires_grad_() for name, each in inputs(**sizes).items()}


@pytest.mark.parametrize("impl", ["chunked", "triton"])
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_of_no_tokens_gradients_are_zero(direction, impl):
    given = {name: each.float() for name, each in inputs(length=0, direction=direction).items()}
    found = results(given, torch.float32, direction=direction, impl=impl)
    assert found["y"].shape == (2, 0, 5)
    for name in ("A", "D", "delta_bias"):
        assert found[name].shape == given[name].shape
        assert not found[name].any()


def test_saved_for_backward_are_the_inputs_and_chunk_states():
    given = leaves(length=37)
    (states,) = saved_beside(given.values(), lambda: selective_scan(**given, chunk_size=10))
    assert states.shape == (1, 2, 4, 5, 3)  # directions, batch, chunks, d, n


def test_the_reference_has_second_derivatives():
    given = leaves(length=4)
    y = selective_scan(**given, impl="reference")
    (grad,) = torch.autograd.grad(y.sum(), given["x"], create_graph=True)
    grad.square().sum().backward()
    assert given["A"].grad.any()


@pytest.mark.parametrize("impl", ["chunked", "reference"])
def test_autocast_has_no_effect(impl):
    given = {name: each.float() for name, each in inputs().items()}
    plain = selective_scan(**given, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        cast = selective_scan(**given, impl=impl)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, plain)


def test_each_tensor_may_have_its_own_dtype():
    dtypes = {"x": torch.bfloat16, "B": torch.float16, "C": torch.float16, "z": torch.bfloat16}
    given = {
        name: each.to(dtypes.get(name, torch.float32)).requires_grad_() for name, each in inputs().items()
    }
    y = selective_scan(**given)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert all(each.grad.dtype == each.dtype for each in given.values())
    wide = {name: each.detach().double() for name, each in given.items()}
    torch.testing.assert_close(y.detach().double(), selective_scan(**wide), rtol=8e-3, atol=1e-4)


# Memory, through oomph.predict


def predicted(
    batch=64, length=512, d=512, n=16, dtype=torch.bfloat16, direction="forward", gated=False, **options
):
    """(Prediction, bytes of the inputs with the incoming gradient and of all gradients)."""
    pair = [2] if direction == "both" else []

    def target():
        def normal(*shape, like=dtype):
            return torch.randn(*shape, device="cuda", dtype=like)

        given = {
            "x": normal(batch, length, d),
            "delta": normal(*pair, batch, length, d),
            "A": -normal(*pair, d, n, like=torch.float32).abs(),
            "B": normal(*pair, batch, length, n),
            "C": normal(*pair, batch, length, n),
            "D": normal(*pair, d, like=torch.float32),
        }
        if gated:
            given["z"] = normal(batch, length, d)
        g = normal(batch, length, d)
        for each in given.values():
            each.requires_grad_()
        more = {"delta_softplus": True, "direction": direction, **options}
        impl = "chunked" if dtype == torch.float64 else "triton"
        assert explain(selective_scan, **given, **more).impl == impl
        selective_scan(**given, **more).backward(g)

    directions = len(pair) + 1
    tokens = batch * length * dtype.itemsize
    own = tokens * (d * (1 + gated + directions) + 2 * directions * n) + directions * d * (n + 1) * 4
    return oomph.predict(target, gpu="h200"), 2 * own + tokens * d


@pytest.mark.parametrize("direction", ["forward", "both"])
@pytest.mark.parametrize("gated", [False, True])
def test_peak_is_less_than_twice_the_inputs_and_gradients(direction, gated):
    prediction, counted = predicted(direction=direction, gated=gated)
    assert prediction.peak.allocated < 2 * counted
    assert max(each.bytes for each in prediction.allocations) <= 64 * MiB  # states of all tokens: 1 GiB


def test_chunked_holds_the_states_of_a_few_rows_and_one_chunk(monkeypatch):
    monkeypatch.setattr(chunked, "_BUFFER_BYTES", {"cuda": MiB})
    prediction, _ = predicted(batch=8, length=64, d=64, chunk_size=32, dtype=torch.float64)
    of_four_rows = 32 * 4 * 64 * 16 * 8
    assert max(each.bytes for each in prediction.allocations) == of_four_rows


def test_memory_is_linear_in_the_length():
    short, _ = predicted(batch=1, length=4096)
    long, _ = predicted(batch=1, length=8192)
    assert long.peak.allocated < 2.05 * short.peak.allocated
    prediction, counted = predicted(batch=1, length=65_536)
    assert prediction.peak.allocated < 2 * counted
