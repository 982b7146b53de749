"""The Triton kernels of selective_scan, in Triton's interpreter; and on a real GPU."""

from __future__ import annotations

import pytest
import torch
from scan_inputs import inputs, relative_error, results, worst_error
from torch import Tensor

from oomph.ops.common import explain
from oomph.ops.state_space import autograd, selective_scan

pytest.importorskip("triton")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")


def both_of(given, programs, monkeypatch, dtype=torch.float32, **options):
    """Results of the reference in float64 and of the kernels, with that many programs to fill."""
    monkeypatch.setattr(autograd, "_PROGRAMS", programs)
    rounded = {name: None if each is None else each.to(dtype).double() for name, each in given.items()}
    right = results(rounded, torch.float64, impl="reference", **options)
    return right, results(rounded, dtype, impl="triton", chunk_size=8, **options)


ONE_SEGMENT, SEGMENTS = 1, 1024


@interpreted
@pytest.mark.parametrize(
    ("direction", "own_x", "shape", "programs"),
    [
        ("forward", False, (1, 1, 1, 1), SEGMENTS),
        ("forward", False, (2, 9, 3, 2), ONE_SEGMENT),
        ("backward", False, (1, 13, 2, 3), SEGMENTS),
        ("both", False, (1, 10, 3, 1), ONE_SEGMENT),
        ("both", True, (1, 11, 2, 2), SEGMENTS),
    ],
)
def test_values_and_gradients(direction, own_x, shape, programs, monkeypatch):
    given = inputs(*shape, direction, own_x)
    right, found = both_of(given, programs, monkeypatch, direction=direction)
    assert worst_error(found, right) < 3e-6


@interpreted
def test_optional_inputs_may_be_omitted(monkeypatch):
    given = {**inputs(1, 5, 3, 2), "D": None, "z": None, "delta_bias": None, "initial_state": None}
    right, found = both_of(given, 1024, monkeypatch, delta_softplus=False)
    assert worst_error(found, right) < 3e-6


@interpreted
def test_half_precision_is_rounded_only_at_the_ends(monkeypatch):
    right, found = both_of(inputs(1, 5, 3, 2), 1, monkeypatch, dtype=torch.float16)
    assert worst_error(found, right) < 2 * torch.finfo(torch.float16).eps


@interpreted
def test_several_blocks_of_channels(monkeypatch):
    tile = autograd.StateTile(channels=2, n=2, warps=1)
    monkeypatch.setattr(autograd, "state_tile", lambda d, n: tile)
    right, found = both_of(inputs(1, 5, 3, 2), 1, monkeypatch)
    assert worst_error(found, right) < 3e-6


@interpreted
@pytest.mark.parametrize("name", ["x", "B", "delta_bias"])
def test_a_single_gradient(name, monkeypatch):
    monkeypatch.setattr(autograd, "_PROGRAMS", 1)
    given = {other: each.float() for other, each in inputs(1, 5, 3, 2).items()}
    right = results(given, torch.float32, delta_softplus=True)
    given[name].requires_grad_()
    y, final = selective_scan(
        **given, delta_softplus=True, return_final_state=True, impl="triton", chunk_size=8
    )
    torch.autograd.backward([y, final], [torch.linspace(-1, 2, e.numel()).view(e.shape) for e in (y, final)])
    torch.testing.assert_close(given[name].grad, right[name], rtol=1e-5, atol=1e-5)


@interpreted
def test_inputs_need_not_be_contiguous(monkeypatch):
    monkeypatch.setattr(autograd, "_PROGRAMS", 1)
    given = {name: each.float() for name, each in inputs(1, 5, 3, 2, "both").items()}
    turned = {
        name: each.transpose(-1, -2).contiguous().transpose(-1, -2) if each.dim() > 2 else each
        for name, each in given.items()
    }
    y = selective_scan(**turned, direction="both", impl="triton")
    torch.testing.assert_close(y, selective_scan(**given, direction="both"), rtol=1e-5, atol=1e-5)


@interpreted
def test_softplus_is_accurate_for_large_and_small_deltas():
    raw = torch.tensor([-80.0, -20.0, -8.0, 0.0, 8.0, 19.9, 30.0, 100.0])
    shape = (1, 1, len(raw))
    ones = torch.ones(1, 1, 1)
    given = {"x": torch.ones(shape), "delta": raw.view(shape), "A": -torch.ones(len(raw), 1) * 0.0}
    y = selective_scan(**given, B=ones, C=ones, delta_softplus=True, impl="triton")
    right = torch.nn.functional.softplus(raw.double())
    torch.testing.assert_close(y.view(-1).double(), right, rtol=1e-6, atol=0)


@interpreted
def test_nan_reaches_later_tokens_of_its_channel_only():
    given = {name: each.float() for name, each in inputs(1, 6, 2, 2).items()}
    given["delta"][0, 4, 1] = float("nan")
    y = selective_scan(**given, delta_softplus=True, impl="triton")
    assert y[0, 4:, 1].isnan().all()
    assert y[0, :, 0].isfinite().all()
    assert y[0, :4].isfinite().all()


@interpreted
def test_chunk_size_is_rounded_up():
    given = {name: each.float() for name, each in inputs().items()}
    assert explain(selective_scan, **given, impl="triton", chunk_size=9).settings == {"chunk_size": 16}


# On a real GPU

CASES = [
    ((1, 1, 1, 1), "forward", False),
    ((3, 257, 127, 16), "forward", False),
    ((1, 1000, 33, 5), "backward", False),
    ((2, 301, 96, 16), "both", False),
    ((2, 127, 257, 64), "both", True),
    ((600, 9, 64, 3), "both", False),  # enough rows: one segment
]


def on_gpu(given: dict[str, Tensor], impl: str, dtype: torch.dtype, direction: str) -> dict[str, Tensor]:
    leaves = {name: each.detach().to("cuda", dtype).requires_grad_() for name, each in given.items()}
    y, final = selective_scan(
        **leaves, delta_softplus=True, direction=direction, return_final_state=True, impl=impl
    )
    weights = [torch.linspace(-1, 2, each.numel(), device="cuda").view(each.shape) for each in (y, final)]
    torch.autograd.backward([y, final], [g.to(e.dtype) for g, e in zip(weights, (y, final), strict=True)])
    return {"y": y.detach(), "final": final.detach(), **{name: each.grad for name, each in leaves.items()}}


@pytest.fixture
def poisoned():
    """Fresh memory is NaN, so that what a kernel forgets to write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "direction", "own_x"), CASES, ids=str)
def test_gpu_error_is_that_of_plain_torch(shape, direction, own_x, dtype, poisoned):
    given = {name: each.to(dtype).double() for name, each in inputs(*shape, direction, own_x).items()}
    right = on_gpu(given, "chunked", torch.float64, direction)
    plain, found = (on_gpu(given, impl, dtype, direction) for impl in ("chunked", "triton"))
    for name, each in found.items():
        allowed = 3 * relative_error(plain[name], right[name]) + 3e-6
        assert relative_error(each, right[name]) < allowed, name
