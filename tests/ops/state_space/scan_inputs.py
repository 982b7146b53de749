"""Inputs of selective_scan in float64, and every result of a call: y and all gradients."""

from __future__ import annotations

from typing import Any

import torch
from checks import relative_error
from kernel_device import DEVICE
from torch import Tensor

from oomph.ops.state_space import selective_scan


def inputs(
    batch: int = 2,
    length: int = 37,
    d: int = 5,
    n: int = 3,
    direction: str = "forward",
    own_x: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Every tensor that the call takes; with own_x one x per direction."""
    generator = torch.Generator().manual_seed(seed)
    pair = [2] if direction == "both" else []

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return {
        "x": normal(*(pair if own_x else []), batch, length, d),
        "delta": normal(*pair, batch, length, d) / 2,
        "A": -3 * torch.rand(*pair, d, n, dtype=torch.float64, generator=generator),
        "B": normal(*pair, batch, length, n),
        "C": normal(*pair, batch, length, n),
        "D": normal(*pair, d),
        "z": normal(batch, length, d),
        "delta_bias": normal(*pair, d) / 2,
    }


def results(given: dict[str, Any], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """y, and the gradient of every tensor given, for a fixed gradient of y."""
    options = {"delta_softplus": True, **options}
    device = DEVICE if options.get("impl") == "triton" else "cpu"
    leaves = {
        name: each.detach().to(device, dtype, copy=True).requires_grad_()
        for name, each in given.items()
        if each is not None
    }
    y = selective_scan(**leaves, **options)
    y.backward(torch.linspace(-1, 2, y.numel()).view(y.shape).to(y))
    found = {name: each.grad for name, each in leaves.items()}
    assert all(each.dtype == dtype for each in found.values())
    return {name: each.detach().cpu() for name, each in {"y": y, **found}.items()}


def worst_error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert found.keys() == right.keys()
    return max(relative_error(found[name], right[name]) for name in right)
