"""The kernels on a real GPU: the same spikes, the same gradients, one launch each, the predicted peak."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from spiking_inputs import NEURON, normal, relative_error

import oomph
from oomph.ops.spiking import lif_gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gradients(impl: str, device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    kept = (shape[0], *shape[2:])
    drive = (0.4 * normal(*shape, seed=1)).to(dtype).to(device).requires_grad_()
    initial = normal(*kept, seed=2).to(dtype).to(device).requires_grad_()
    decay = torch.rand(shape[2:], generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
    spikes, membrane = lif_gate(drive, initial=initial, impl=impl, **{**NEURON, "decay": decay})
    pulls = [normal(*spikes.shape, seed=4).to(spikes), normal(*membrane.shape, seed=5).to(membrane)]
    torch.autograd.backward([spikes, membrane], pulls)
    found = {"spikes": spikes, "membrane": membrane, "drive": drive.grad, "initial": initial.grad}
    return {name: each.detach().cpu() for name, each in {**found, "decay": decay.grad}.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 53, 3, 41), (2, 257, 8, 64)], ids=str)
def test_spikes_are_those_of_the_cpu_and_gradients_agree(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    right = gradients("reference", "cpu", dtype, shape)
    found = gradients("triton", "cuda", dtype, shape)
    assert torch.equal(found["spikes"], right["spikes"])
    assert torch.equal(found["membrane"], right["membrane"])
    for name in ("drive", "initial", "decay"):
        assert relative_error(found[name], right[name]) < 2 * torch.finfo(dtype).eps + 1e-6, name


def test_the_predicted_peak_is_the_measured_one() -> None:
    def train() -> Callable[[], None]:
        drive = torch.randn(4, 512, 8, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(drive)
        return lambda: lif_gate(drive, **NEURON)[0].backward(grad)

    predicted = oomph.predict(train, gpu="h200").peak.allocated
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = train()
    for _ in range(3):
        step()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(predicted, rel=0.01)
