"""Inputs of selective_scan in float64, and every result of a call: y and all gradients."""

import torch
from checks import relative_error
from kernel_device import DEVICE

from oomph.ops.state_space import selective_scan


def inputs(batch=2, length=37, d=5, n=3, direction="forward", own_x=False, seed=0):
    """Every tensor that the call takes; with own_x one x per direction."""
    generator = torch.Generator().manual_seed(seed)
    pair = [2] if direction == "both" else []

    def normal(*shape):
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


def results(given, dtype, **options):
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


def worst_error(found, right):
    assert found.keys() == right.keys()
    return max(relative_error(found[name], right[name]) for name in right)
