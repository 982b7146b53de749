"""The reference on any device, a chunk of tokens at a time, recomputed in backward.

Saved for backward: the inputs. Beyond them and the gradients, memory holds the scores of one chunk, whose
size does not grow with the length (except for a chunk of one token, whose scores are O(T)). Time is O(T^2):
a chunk attends to all tokens before it, and those that are not selected are masked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import OpFunction, refuse_second_derivatives
from oomph.ops.sparse_attention.arguments import NSAConfig
from oomph.ops.sparse_attention.reference import reference
from oomph.units import MiB

_CPU_CHUNK, _GPU_CHUNK = 32 * MiB, 256 * MiB
_COPIES = 4  # of a chunk's scores that are alive at once in backward


def tokens_per_chunk(q: Tensor, config: NSAConfig) -> int:
    batch, tokens, heads, _ = q.shape
    itemsize = torch.promote_types(q.dtype, torch.float32).itemsize
    scores = 2 * tokens + config.compressed_blocks(tokens)
    budget = _CPU_CHUNK if q.device.type == "cpu" else _GPU_CHUNK
    return max(1, min(max(1, tokens), budget // max(1, batch * heads * scores * itemsize * _COPIES)))


def _chunks(q: Tensor, config: NSAConfig) -> list[tuple[int, int]]:
    tokens, step = q.shape[1], tokens_per_chunk(q, config)
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


class ChunkedSparseAttention(OpFunction):
    op = "nsa"

    @staticmethod
    def forward(ctx: Any, config: NSAConfig, *inputs: Tensor) -> Tensor:
        out = torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)
        for start, end in _chunks(inputs[0], config):
            out[:, start:end] = _attend(_slices(inputs, start, end, config), start, config)
        ctx.save_for_backward(*inputs)
        ctx.config = config
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("nsa")
        inputs, config, wanted = ctx.saved_tensors, ctx.config, ctx.needs_input_grad[1:]
        dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        sums = [
            torch.zeros_like(x, dtype=dtype) if want else None for x, want in zip(inputs, wanted, strict=True)
        ]
        for start, end in _chunks(inputs[0], config):
            chunk = _slices(inputs, start, end, config)
            leaves = [x.detach().requires_grad_(want) for x, want in zip(chunk, wanted, strict=True)]
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            with torch.enable_grad():
                out = _attend(leaves, start, config)
            got = iter(torch.autograd.grad(out, asked, grad[:, start:end].to(dtype), allow_unused=True))
            for place, leaf in zip(_views(sums, start, end, config), leaves, strict=True):
                gradient = next(got) if leaf.requires_grad else None
                if place is not None and gradient is not None:
                    place.add_(gradient)
        return None, *(None if s is None else s.to(x.dtype) for s, x in zip(sums, inputs, strict=True))


def _views(tensors: Sequence[Tensor | None], start: int, end: int, config: NSAConfig) -> list[Any]:
    """The chunk of q and the gates, and the keys and values up to its end; None for None."""
    q, k, v, ck, cv, *gates = tensors
    n = config.compressed_blocks(end)
    ranges = [(q, start, end), (k, 0, end), (v, 0, end), (ck, 0, n), (cv, 0, n)]
    ranges += [(gate, start, end) for gate in gates]
    return [None if x is None else x[:, lower:upper] for x, lower, upper in ranges]


def _slices(inputs: Sequence[Tensor], start: int, end: int, config: NSAConfig) -> list[Tensor]:
    """The inputs of one chunk, in the dtype of the sums."""
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    return [x.to(dtype) for x in _views(inputs, start, end, config)]


def _attend(chunk: Sequence[Tensor], start: int, config: NSAConfig) -> Tensor:
    q, k, v, ck, cv, *gates = chunk
    return reference(q, k, v, gates, ck, cv, config, start=start)
