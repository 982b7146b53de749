"""Small MLPs for the tests of tiled_mlp, and the comparison they all make."""

import torch
from torch import nn

from oomph.ops.mlp import MLPWeights


def weights(
    activation="silu", gated=True, bias=False, d=12, f=20, out=9, dtype=torch.float64, seed=0, device="cpu"
):
    generator = torch.Generator().manual_seed(d + f + out + seed)

    def leaf(*shape):
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


def tokens(*shape, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()


def results(run, inputs):
    """The value of `run` and the gradients of a fixed functional of it."""
    value = run()
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
    return [value.detach(), *torch.autograd.grad(value, list(inputs), grad)]


def assert_same(ours, theirs, tolerance=1e-12):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class PlainGated(nn.Module):
    """What most language models have, under names of its own."""

    def __init__(self, d=12, f=20):
        super().__init__()
        self.w1 = nn.Linear(d, f, bias=False)
        self.w3 = nn.Linear(d, f, bias=False)
        self.w2 = nn.Linear(f, d, bias=False)

    def forward(self, x):
        gate = nn.functional.silu(self.w1(x))
        return self.w2(gate * self.w3(x))


class NormalisedGated(PlainGated):
    """The same attributes, another function."""

    def forward(self, x):
        hidden = nn.functional.silu(self.w1(x)) * self.w3(x)
        return self.w2(hidden / hidden.norm(dim=-1, keepdim=True))
