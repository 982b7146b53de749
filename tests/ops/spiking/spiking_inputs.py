"""Inputs that the tests of lif_gate share, and its gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from oomph.ops.spiking import lif_gate

NEURON = {"decay": 0.92, "threshold": 0.35, "surrogate_beta": 9.0}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(
    impl: str,
    shape: tuple[int, ...] = (2, 21, 3, 5),
    dtype: torch.dtype = torch.float64,
    *,
    train: str = "drive decay initial",
    decay_shape: tuple[int, ...] | None = None,
    exact: bool = False,
) -> dict[str, Tensor]:
    """Spikes, membrane and the gradients of what `train` names, on the same numbers for every call.

    `exact` computes in float64 on the numbers that `dtype` can hold.
    """
    used = torch.float64 if exact else dtype
    kept = (shape[0], *shape[2:])
    drive = (0.4 * normal(*shape, seed=1)).to(dtype).to(used)
    initial = normal(*kept, seed=2).to(dtype).to(used)
    options = dict(NEURON)
    if decay_shape is not None:
        options["decay"] = torch.rand(decay_shape, generator=torch.Generator().manual_seed(3)).double()
    given = {"drive": drive, "initial": initial, "decay": options["decay"]}
    given = {name: each for name, each in given.items() if name in train and isinstance(each, Tensor)}
    for each in given.values():
        each.requires_grad_()
    spikes, membrane = lif_gate(drive, initial=initial, impl=impl, **options)
    if given:
        pulls = [normal(*spikes.shape, seed=4).to(spikes), normal(*membrane.shape, seed=5).to(membrane)]
        torch.autograd.backward([spikes, membrane], pulls)
    found = {"spikes": spikes.detach(), "membrane": membrane.detach()}
    return found | {name: each.grad for name, each in given.items() if each.grad is not None}


def relative_error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))
