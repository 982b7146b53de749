"""Small MLPs for the tests of tiled_mlp, and the comparison they all make."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from oomph.ops.mlp import MLPWeights


def weights(
    activation: str = "silu",
    gated: bool = True,
    bias: bool = False,
    d: int = 12,
    f: int = 20,
    out: int = 9,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> MLPWeights:
    generator = torch.Generator().manual_seed(d + f + out + seed)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) / max(shape[-1], 1) ** 0.5
        return values.to(device, dtype).requires_grad_()

    return MLPWeights(
        up=leaf(f, d),
        down=leaf(out, f),
        gate=leaf(f, d) if gated else None,
        up_bias=leaf(f) if bias else None,
        gate_bias=leaf(f) if bias and gated else None,
        down_bias=leaf(out) if bias else None,
        activation=activation,
    )


def tokens(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


def results(run: Callable[[], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The value of `run` and the gradients of a fixed functional of it."""
    value = run()
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    return [value.detach(), *torch.autograd.grad(value, list(inputs), grad)]


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class PlainGated(nn.Module):
    """What most language models have, under names of its own."""

    def __init__(self, d: int = 12, f: int = 20) -> None:
        super().__init__()
        self.w1 = nn.Linear(d, f, bias=False)
        self.w3 = nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(f, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.silu(self.w1(x))
        return self.w2(gate * self.w3(x))


class NormalisedGated(PlainGated):
    """The same attributes, another function."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.silu(self.w1(x)) * self.w3(x)
        return self.w2(hidden / hidden.norm(dim=-1, keepdim=True))
