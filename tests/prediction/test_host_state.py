"""A prediction is of the GPU: what the process did before, and the host's own libraries, do not move it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from small_programs import mean_square
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import oomph
from oomph import Prediction, Workload


@pytest.fixture(params=["oneDNN on", "oneDNN off", "one thread", "several threads"])
def host(request: pytest.FixtureRequest) -> Iterator[str]:
    """torch turns oneDNN off by itself, for good, when a half-precision product fails on the processor."""
    enabled, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
    torch._C._set_mkldnn_enabled(request.param != "oneDNN off")
    torch.set_num_threads({"one thread": 1, "several threads": 3}.get(request.param, threads))
    FakeTensorMode.cache_clear()  # or torch gives the answer it gave in another state
    yield request.param
    torch._C._set_mkldnn_enabled(enabled)
    torch.set_num_threads(threads)


def layouts(layer: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> list[bool]:
    """Whether the result and the gradients of input and weight are in channels last."""
    found = []
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape), torch.contiguous_format)

    def program() -> None:
        x = torch.randn(shape, device="cuda", dtype=dtype).to(memory_format=last).requires_grad_()
        module = layer().to("cuda", dtype)
        out = module(x)
        gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()])
        found.extend(t.is_contiguous(memory_format=last) for t in (out, *gradients) if t.dim() == len(shape))

    oomph.predict(program, gpu="h200")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(8, 16, 3, padding=1), (16, 8, 12, 12)),
        (lambda: nn.Conv2d(8, 16, 1), (1, 8, 12, 12)),
        (lambda: nn.Conv2d(8, 8, 7, padding=3, groups=8), (16, 8, 12, 12)),
        (lambda: nn.Conv2d(8, 16, 3, dilation=2, groups=2), (16, 8, 12, 12)),
        (lambda: nn.ConvTranspose2d(8, 16, 2, stride=2), (16, 8, 12, 12)),
        (lambda: nn.Conv3d(4, 8, 3), (2, 4, 6, 6, 6)),
        (lambda: nn.ConvTranspose3d(4, 8, 2), (2, 4, 6, 6, 6)),
    ],
)
def test_a_convolution_of_channels_last_stays_channels_last_whatever_the_host_would_do(
    host: str, layer: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert layouts(layer, shape, dtype) == [True, True, True]


def test_a_convolution_in_float64_is_contiguous_as_in_cudnn(host: str) -> None:
    assert layouts(lambda: nn.Conv2d(8, 16, 3), (2, 8, 12, 12), torch.float64) == [False, False, False]


class Block(nn.Module):
    """A depthwise convolution between tensors whose channels are last, as ConvNeXt has it."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 7, padding=3, groups=16)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def of_two_blocks() -> Prediction:
    return oomph.predict(
        Workload(
            model=lambda: nn.Sequential(Block(), Block()),
            batch=lambda device: torch.randn(16, 16, 32, 32, device=device),
            loss=mean_square,
        ),
        gpu="h200",
    )


def test_a_prediction_is_the_same_before_and_after_the_host_loses_onednn() -> None:
    enabled = torch.backends.mkldnn.enabled
    sizes = []
    try:
        for on in (True, False, True):
            torch._C._set_mkldnn_enabled(on)
            FakeTensorMode.cache_clear()  # or torch gives the answer it gave in another state
            sizes.append([allocation.bytes for allocation in of_two_blocks().allocations])
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    assert sizes[0] == sizes[1] == sizes[2]
