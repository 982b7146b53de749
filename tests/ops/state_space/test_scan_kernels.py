"""The Triton kernels of selective_scan: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from checks import relative_error
from kernel_device import DEVICE, HALF
from scan_inputs import inputs, results, worst_error

from oomph.ops.state_space import autograd, selective_scan

pytest.importorskip("triton")


def both_of(given, programs, monkeypatch, dtype=torch.float32, **options):
    """Results of the reference in float64 and of the kernels, with that many programs to fill."""
    monkeypatch.setattr(autograd, "_PROGRAMS", programs)
    rounded = {name: None if each is None else each.to(dtype).double() for name, each in given.items()}
    right = results(rounded, torch.float64, impl="reference", **options)
    return right, results(rounded, dtype, impl="triton", chunk_size=8, **options)


ONE_SEGMENT, SEGMENTS = 1, 1024


@pytest.mark.parametrize(
    ("direction", "own_x", "shape", "programs"),
    [
        ("forward", False, (1, 1, 1, 1), SEGMENTS),
        ("forward", False, (2, 9, 3, 2), ONE_SEGMENT),
        ("backward", False, (1, 10, 2, 3), SEGMENTS),
        ("both", False, (1, 9, 3, 1), ONE_SEGMENT),
        ("both", True, (1, 9, 2, 2), SEGMENTS),
    ],
)
def test_values_and_gradients(direction, own_x, shape, programs, monkeypatch):
    given = inputs(*shape, direction, own_x)
    right, found = both_of(given, programs, monkeypatch, direction=direction)
    assert worst_error(found, right) < 3e-6


@pytest.mark.parametrize("case", ["without optional inputs", "half precision", "blocks of channels"])
def test_a_small_scan(case, monkeypatch):
    given, dtype, options = inputs(1, 5, 3, 2), torch.float32, {}
    if case == "without optional inputs":
        given, options = {**given, "D": None, "z": None, "delta_bias": None}, {"delta_softplus": False}
    elif case == "half precision":
        dtype = HALF
    else:
        tile = autograd.StateTile(channels=2, n=2, warps=1)
        monkeypatch.setattr(autograd, "state_tile", lambda d, n: tile)
    right, found = both_of(given, ONE_SEGMENT, monkeypatch, dtype=dtype, **options)
    assert worst_error(found, right) < max(3e-6, 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["x", "B", "delta_bias"])
def test_a_single_gradient(name, monkeypatch):
    monkeypatch.setattr(autograd, "_PROGRAMS", 1)
    given = {other: each.to(DEVICE, torch.float32) for other, each in inputs(1, 5, 3, 2).items()}
    right = results(given, torch.float32, delta_softplus=True)
    given[name].requires_grad_()
    y = selective_scan(**given, delta_softplus=True, impl="triton", chunk_size=8)
    y.backward(torch.linspace(-1, 2, y.numel(), device=DEVICE).view(y.shape))
    torch.testing.assert_close(given[name].grad, right[name].to(DEVICE), rtol=1e-5, atol=1e-5)


def test_inputs_need_not_be_contiguous(monkeypatch):
    monkeypatch.setattr(autograd, "_PROGRAMS", 1)
    given = {name: each.to(DEVICE, torch.float32) for name, each in inputs(1, 5, 3, 2, "both").items()}
    turned = {
        name: each.transpose(-1, -2).contiguous().transpose(-1, -2) if each.dim() > 2 else each
        for name, each in given.items()
    }
    y = selective_scan(**turned, direction="both", impl="triton")
    torch.testing.assert_close(y, selective_scan(**given, direction="both"), rtol=1e-5, atol=1e-5)


def test_softplus_is_accurate_for_large_and_small_deltas():
    raw = torch.tensor([-80.0, -20.0, -8.0, 0.0, 8.0, 19.9, 30.0, 100.0], device=DEVICE)
    shape = (1, 1, len(raw))
    ones = torch.ones(1, 1, 1, device=DEVICE)
    given = {"x": ones.expand(shape), "delta": raw.view(shape), "A": torch.zeros(len(raw), 1, device=DEVICE)}
    y = selective_scan(**given, B=ones, C=ones, delta_softplus=True, impl="triton")
    right = torch.nn.functional.softplus(raw.double())
    torch.testing.assert_close(y.view(-1).double(), right, rtol=1e-6, atol=0)


LARGE = [
    ((3, 257, 127, 16), "forward", False),
    ((1, 1000, 33, 5), "backward", False),
    ((2, 127, 257, 64), "both", True),
    ((600, 9, 64, 3), "both", False),  # enough rows: one segment
]


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "direction", "own_x"), LARGE, ids=str)
def test_gpu_error_is_that_of_plain_torch(shape, direction, own_x, dtype):
    given = {n: each.to(dtype).double() for n, each in inputs(*shape, direction, own_x).items()}
    right = results(given, torch.float64, impl="chunked", direction=direction)
    plain, found = (results(given, dtype, impl=impl, direction=direction) for impl in ("chunked", "triton"))
    for name, each in found.items():
        allowed = 3 * relative_error(plain[name], right[name]) + 3e-6
        assert relative_error(each, right[name]) < allowed, name
