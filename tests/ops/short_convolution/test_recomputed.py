"""Functions run a slice of tokens at a time: the same results and gradients, and only inputs kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.nn.short_convolution import ShortConvolution
from oomph.ops import tokenwise as module
from oomph.ops.tokenwise import tokenwise_checkpoint


def gated(x: Tensor, mask: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return torch.where(mask, torch.sigmoid(x * weight).exp() * y.tanh(), x)


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = (torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return x, torch.rand(2, length, 3) > 0.5, y, torch.randn(3, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_slices_change_neither_results_nor_gradients(
    length: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", rows * 2 * 3 * 4)
    x, mask, y, weight = inputs(length)
    found, right = tokenwise_checkpoint(gated, (x, mask, y), (weight,)), gated(x, mask, y, weight)
    assert torch.equal(found, right)
    pull = torch.randn_like(right)
    for one, two in zip(
        torch.autograd.grad(found, (x, y, weight), pull),
        torch.autograd.grad(right, (x, y, weight), pull),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_only_the_inputs_are_kept() -> None:
    x, mask, y, weight = inputs(50)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        tokenwise_checkpoint(gated, (x, mask, y), (weight,))
    addresses = {each.data_ptr() for each in kept}
    assert addresses == {each.data_ptr() for each in (x, mask, y, weight)}


def test_second_derivatives_are_refused() -> None:
    x, mask, y, weight = inputs(3)
    with pytest.raises(ArgumentError, match="cannot be differentiated twice"):
        torch.autograd.grad(tokenwise_checkpoint(gated, (x, mask, y), (weight,)).sum(), x, create_graph=True)


@pytest.mark.parametrize("rows", [1, 2, 4, 100])
@pytest.mark.parametrize("taps", [1, 3, 4])
def test_the_short_convolution_is_a_padded_depthwise_one(
    taps: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE_BYTES", rows * 2 * 5 * 4)
    made = ShortConvolution(5, taps, dtype=torch.float64)
    x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    y, last = made(x)
    padded = F.pad(x.transpose(1, 2), (taps - 1, 0))
    right = F.silu(F.conv1d(padded, made.weight, groups=5)).transpose(1, 2)
    torch.testing.assert_close(y, right)
    assert torch.equal(last, x[:, 9 - taps + 1 :])
    pull = torch.randn_like(right)
    for one, two in zip(
        torch.autograd.grad(y, (x, made.weight), pull),
        torch.autograd.grad(right, (x, made.weight), pull),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


def test_units_are_of_length_one_and_zeros_stay_zeros() -> None:
    made = ShortConvolution(6, 2, unit_size=3)
    x = torch.randn(1, 4, 6)
    x[:, 2:] = 0
    y, _ = made(x)
    lengths = y.unflatten(-1, (2, 3)).norm(dim=-1)
    torch.testing.assert_close(lengths[:, :3], torch.ones(1, 3, 2), rtol=1e-3, atol=1e-3)
    assert not y[:, 3].any()
