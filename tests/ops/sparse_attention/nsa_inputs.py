"""Inputs for the tests of nsa, and a call with a learned compressor."""

import torch

from oomph.ops.sparse_attention import nsa

# Small blocks, so that short sequences have many.
SMALL = {"block_size": 16, "compress_block": 8, "compress_stride": 4, "top_n": 4, "window": 10}
ODD = {"block_size": 12, "compress_block": 12, "compress_stride": 4, "top_n": 5, "window": 40}
NAMES = ("out", "dq", "dk", "dv", "dgate_cmp", "dgate_slc", "dgate_win", "dmap")


def inputs(tokens, heads=4, key_heads=2, width=8, batch=1, dtype=torch.float64, device="cpu", seed=0):
    """q, k, v, the three gates, and a gradient of the result."""
    make = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=make).to(device, dtype)

    q, k, v = (random(batch, tokens, h, width) for h in (heads, key_heads, key_heads))
    gates = [torch.sigmoid(random(batch, tokens, heads)) for _ in range(3)]
    return [q, k, v, *gates], random(batch, tokens, heads, width)


def learned(weight):
    """A pair of compressors with a parameter [2, L]: weighted sums of a block's keys and values."""

    def of(number):
        return lambda blocks: torch.einsum(
            "bnlhd,l->bnhd", blocks, weight[number].softmax(0).to(blocks.dtype)
        )

    return of(0), of(1)


def call(tensors, grad, impl, dtype=None, **options):
    """The result, and the gradients of all inputs and of the learned compressor."""
    dtype = dtype or tensors[0].dtype
    tensors = [x.detach().to(dtype).requires_grad_() for x in tensors]
    make = torch.Generator().manual_seed(7)
    size = options.get("compress_block", 32)
    weight = torch.randn((2, size), generator=make).to(grad.device, dtype).requires_grad_()
    out = nsa(*tensors, compress=learned(weight), impl=impl, **options)
    wanted = [*tensors, weight]
    found = torch.autograd.grad(out, wanted, grad.to(dtype), allow_unused=True)
    none_is_zero = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
    return [out.detach(), *none_is_zero]


def assert_close(got, expected, tolerance):
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert a.shape == b.shape, name
        error = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        assert error <= tolerance * max(1.0, b.abs().max().item() if b.numel() else 0.0), (name, error)
