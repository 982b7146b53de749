"""The convolution's kernels, and the layers that use them, on a real GPU: errors and the predicted peak."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oomph
from oomph.nn.delta_attention import KimiDeltaAttention
from oomph.nn.sparse_attention import NativeSparseAttention
from oomph.nn.spiking_kda import SpikingKDABlock
from oomph.ops.short_convolution import short_convolution

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "kimi": lambda **made: KimiDeltaAttention(128, 2, 64, **made),
    "spiking": lambda **made: SpikingKDABlock(128, 2, 64, **made),
    "sparse": lambda **made: NativeSparseAttention(128, 4, 2, 64, window=64, **made),
}


def relative_error(found: Tensor, right: Tensor) -> float:
    return float((found.double().cpu() - right.cpu()).norm() / right.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("channels", "unit", "taps"), [(96, 48, 4), (256, 128, 4), (200, None, 3)])
def test_results_and_gradients_are_rounded_once(
    channels: int, unit: int | None, taps: int, dtype: torch.dtype
) -> None:
    shapes = ((2, 300 + taps - 1, channels), (channels, 1, taps), (2, 300, channels))
    x, weight, pull = (torch.randn(*shape, device="cuda").to(dtype) for shape in shapes)
    results = []
    for impl, used in (("triton", dtype), ("reference", torch.float64)):
        given = [each.to(used).requires_grad_() for each in (x, weight)]
        y = short_convolution(*given, unit_size=unit, impl=impl)
        results.append((y.detach(), *torch.autograd.grad(y, given, pull.to(used))))
    for found, right in zip(*results, strict=True):
        assert relative_error(found, right) < 2 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_in_float32_is_near_itself_in_float64_on_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    exact = LAYERS[name](dtype=torch.float64)
    near = LAYERS[name](device="cuda", dtype=torch.float32)
    near.load_state_dict(exact.state_dict())
    x, pull = torch.randn(2, 2, 200, 128, dtype=torch.float64)
    found, right = (_trained(each, x, pull) for each in (near, exact))
    for one, two in zip(found, right, strict=True):
        assert relative_error(one, two) < 2e-2 or two.norm() < 1e-9


@pytest.mark.parametrize("name", LAYERS)
def test_the_predicted_peak_of_a_layer_is_the_measured_one_within_one_percent(name: str) -> None:
    def train() -> Callable[[], None]:
        made = LAYERS[name](device="cuda", dtype=torch.bfloat16)
        x = torch.randn(2, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return lambda: _output(made(x)).sum().backward()

    predicted = oomph.predict(train, gpu="h200").peak.allocated
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = train()
    for _ in range(3):
        step()
    measured = torch.cuda.max_memory_allocated()
    # What earlier tests left is not this program's; the workspaces of the library may be among it.
    assert measured - before <= predicted * 1.01
    assert measured >= predicted * 0.99


def _trained(made: nn.Module, x: Tensor, pull: Tensor) -> list[Tensor]:
    like = next(made.parameters())
    given = x.to(like).requires_grad_()
    y = _output(made(given))
    grads = torch.autograd.grad(y, [given, *made.parameters()], pull.to(like), allow_unused=True)
    return [y.detach(), *(each for each in grads if each is not None)]


def _output(given: Any) -> Tensor:
    return given[0] if isinstance(given, tuple) else given
