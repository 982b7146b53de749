"""The kernels on a real GPU: errors against float64, repeatability, and the predicted peak."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from scan_inputs import inputs, relative_error
from torch import Tensor

import oomph
from oomph.ops.state_space import selective_scan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "direction", "own_x"), CASES, ids=str)
def test_every_result_is_as_near_to_float64_as_plain_torch(shape, direction, own_x, dtype, poisoned):
    given = {name: each.to(dtype).double() for name, each in inputs(*shape, direction, own_x).items()}
    right = on_gpu(given, "chunked", torch.float64, direction)
    plain, found = (on_gpu(given, impl, dtype, direction) for impl in ("chunked", "triton"))
    for name, each in found.items():
        allowed = 3 * relative_error(plain[name], right[name]) + 3e-6
        assert relative_error(each, right[name]) < allowed, name


def test_the_same_inputs_give_the_same_bits_on_the_gpu():
    given = inputs(2, 301, 96, 16, "both")
    one, two = (on_gpu(given, "triton", torch.bfloat16, "both") for _ in range(2))
    assert all(torch.equal(each, two[name]) for name, each in one.items())


@pytest.mark.parametrize(("batch", "length"), [(64, 512), (1, 16_384)])
def test_the_predicted_peak_is_the_measured_one_within_one_percent(batch, length):
    def train() -> Callable[[], None]:
        options = {"device": "cuda", "dtype": torch.bfloat16}
        x, delta, g = (torch.randn(batch, length, 512, **options) for _ in range(3))
        B, C = (torch.randn(batch, length, 16, **options).requires_grad_() for _ in range(2))
        A = -torch.rand(512, 16, device="cuda")
        for each in (x, delta, A):
            each.requires_grad_()
        return lambda: selective_scan(x, delta, A, B, C, delta_softplus=True).backward(g)

    predicted = oomph.predict(train, gpu="h200").peak.allocated
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = train()
    for _ in range(3):
        step()
    measured = torch.cuda.max_memory_allocated() - before
    assert measured == pytest.approx(predicted, rel=0.01)
