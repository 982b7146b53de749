"""Values and every gradient of selective_scan in plain torch against the token-by-token reference."""

import pytest
import torch
from checks import relative_error
from kernel_device import DEVICE
from scan_inputs import inputs, results, worst_error

from oomph.ops.state_space import chunked, reference, selective_scan

DIRECTIONS = [("forward", False), ("backward", False), ("both", False), ("both", True)]
SHAPES = [(1, 1, 1, 1), (2, 3, 4, 2), (1, 127, 3, 1), (3, 40, 1, 5), (2, 130, 2, 3)]


@pytest.mark.parametrize(("direction", "own_x"), DIRECTIONS)
@pytest.mark.parametrize(("batch", "length", "d", "n"), SHAPES)
def test_values_and_gradients(batch, length, d, n, direction, own_x):
    given = inputs(batch, length, d, n, direction, own_x)
    right = results(given, torch.float64, direction=direction, impl="reference")
    for chunk_size in (1, 16, None) if length < 100 else (16, None):
        found = results(given, torch.float64, direction=direction, impl="chunked", chunk_size=chunk_size)
        assert worst_error(found, right) < 1e-13


def test_both_directions_are_a_scan_of_the_sequence_and_one_of_its_reverse():
    given = inputs(direction="both", own_x=True)
    gate = torch.nn.functional.silu(given.pop("z"))
    one, two = ({name: each[i] for name, each in given.items()} for i in (0, 1))
    turned = {name: two[name].flip(1) for name in ("x", "delta", "B", "C")}
    right = reference.selective_scan(**one, delta_softplus=True)
    left = reference.selective_scan(**{**two, **turned}, delta_softplus=True)
    y = selective_scan(
        **given, z=inputs(direction="both", own_x=True)["z"], delta_softplus=True, direction="both"
    )
    torch.testing.assert_close(y, (right + left.flip(1)) * gate)


@pytest.mark.parametrize("rate", [0.05, 0.0, -1e-4, -5.0, -1000.0])
def test_growth_and_slow_and_fast_decays_in_float32(rate):
    given = inputs(length=200, d=4, n=3)
    given["A"].fill_(rate)
    right = results(given, torch.float64, impl="reference")
    found = results(given, torch.float32)
    for name, each in found.items():
        assert each.isfinite().all()
        if name != "A" or rate > -100:  # beyond that its gradient is zero but for underflow
            assert relative_error(each, right[name]) < 2e-5, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_error_is_that_of_rounding(dtype):
    given = {name: each.to(dtype).double() for name, each in inputs(3, 130, 6, 4, "both").items()}
    right = results(given, torch.float64, direction="both", impl="reference")
    found = results(given, dtype, direction="both")
    assert worst_error(found, right) < 2.5 * torch.finfo(dtype).eps


def test_long_sequence_in_float32():
    length, d, n = 16_384, 2, 1
    given = inputs(1, length, d, n)
    y = selective_scan(**{name: each.float() for name, each in given.items()}, delta_softplus=True)
    # The state that enters a slice depends on no more than the 1,000 tokens before it, with this decay.
    for start in (0, 8_000, length - 300):
        early = max(0, start - 1000)
        part = {
            name: each[:, early : start + 300] if each.dim() == 3 else each for name, each in given.items()
        }
        right = reference.selective_scan(**part, delta_softplus=True)
        assert relative_error(y[:, start : start + 300], right[:, start - early :]) < 1e-5


@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_nan_reaches_later_tokens_of_its_channel_only(impl):
    device = DEVICE if impl == "triton" else "cpu"
    given = {name: each.to(device, torch.float32) for name, each in inputs(1, 9, 3, 2).items()}
    for name in ("x", "delta"):
        spoiled = given[name].clone()
        spoiled[0, 5, 2] = float("nan")
        y = selective_scan(**{**given, name: spoiled}, chunk_size=8, impl=impl)
        assert y[0, 5:, 2].isnan().all()
        y[0, 5:, 2] = 0.0
        assert y.isfinite().all()


def test_batch_rows_one_at_a_time_agree_with_all(monkeypatch):
    given = inputs(2, 64, 3, 2, "both")
    together = results(given, torch.float64, direction="both")
    monkeypatch.setattr(chunked, "_BUFFER_BYTES", {"cpu": 1})
    assert worst_error(together, results(given, torch.float64, direction="both")) < 1e-13
