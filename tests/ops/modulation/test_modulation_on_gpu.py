"""The kernels on a real GPU: errors against float32, repeatability, and the predicted peak."""

from __future__ import annotations

import pytest
import torch
from modulation_inputs import inputs, relative_error
from torch import Tensor

from oomph.ops.modulation import modulated_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [
    {"lead": (1,), "d": 16, "f": 16, "r": 1},
    {"lead": (257,), "d": 127, "f": 1000, "r": 5},
    {"lead": (3, 30001), "d": 256, "f": 520, "r": 16},
    {"lead": (1000,), "d": 512, "f": 1024, "r": 128},
]


def on_gpu(impl: str, dtype: torch.dtype, shape: dict) -> dict[str, Tensor]:
    given = inputs(**shape).copy(dtype)
    moved = [None if each is None else each.detach().cuda().requires_grad_() for each in given.all()]
    y = modulated_linear(*moved, impl=impl)
    g = torch.linspace(-1, 2, y.numel(), device="cuda").view(y.shape).to(y.dtype)
    y.backward(g)
    gradients = {
        name: each.grad for name, each in zip(("h", "W", "A", "B", "mod", "bias"), moved, strict=True)
    }
    return {"y": y.detach(), **gradients}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", ["chunked", "triton"])
def test_no_result_is_worse_than_plain_torch_makes_it(impl: str, shape: dict, dtype: torch.dtype) -> None:
    right = on_gpu("reference", torch.float64, shape)
    plain, found = on_gpu("reference", dtype, shape), on_gpu(impl, dtype, shape)
    for name, each in found.items():
        error, allowed = relative_error(each, right[name]), relative_error(plain[name], right[name])
        # A gradient of one number may be rounded well in one version and badly in the other.
        assert error < 1.1 * allowed + (torch.finfo(dtype).eps if each.numel() < 100 else 1e-4), name
