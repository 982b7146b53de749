"""Query tiles through PyTorch's fused CPU kernel, with the bias and the masks of a tile as its attn_mask.

Faster than products and a softmax of our own, but the kernel gives no gradient of the mask. Saved for
backward: the inputs, the result and the log-sum-exp of every row. Half precision is computed in fp32.

B batch, H query heads, G key/value heads, Q and K lengths.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_compile, refuse_second_derivatives
from oomph.ops.launch import is_fake
from oomph.ops.softmax_attention.biases import LocalityBias
from oomph.ops.softmax_attention.problem import Problem
from oomph.ops.softmax_attention.tiles import (
    DEFAULT_BUDGET_ON_CPU,
    QUERIES_PER_TILE,
    QueryTile,
    bias_part,
    bias_values,
    query_tiles,
)

aten = torch.ops.aten
_MASK_BUFFERS = 3  # the mask, and what its evaluation holds


def fits_cpu_kernel(p: Problem) -> bool:
    """Can the kernel compute the result? Its backward also needs a bias without gradients."""
    same_head = p.q.shape[3] == p.v.shape[3]
    empty = 0 in (p.q.numel(), p.k.numel())
    return p.q.device.type == "cpu" and same_head and not (empty or is_fake(p.q))


@no_compile
def chunked_cpu(p: Problem) -> Tensor:
    out: Tensor = _TiledCpuAttention.apply(p, p.q, p.k, p.v)  # type: ignore[no-untyped-call]
    return out


def queries_per_tile(p: Problem) -> int:
    """As many as the budget allows; causal tiles no taller than wastes little of their upper triangle."""
    itemsize = 8 if p.q.dtype == torch.float64 else 4
    per_query = max(1, _bias_sizes(p)[1] * p.keys) * itemsize * _MASK_BUFFERS
    most = max(1, (p.memory_budget or DEFAULT_BUDGET_ON_CPU) // per_query)
    if p.cuts_future:
        most = min(most, QUERIES_PER_TILE)
    return min(most, p.queries if p.pattern is None else p.pattern.block)


def _bias_sizes(p: Problem) -> tuple[int, int]:
    """(batch entries, heads) over which the bias differs; a function is asked for a single query and key."""
    if p.bias is not None:
        return p.bias.shape[0], p.bias.shape[1]
    if p.bias_function is None:
        return 1, 1
    if isinstance(p.bias_function, LocalityBias):
        return (p.q.shape[0] if p.bias_function.is_batched else 1), 1
    batch, heads = (torch.zeros(size, dtype=torch.int64) for size in p.q.shape[:2])
    one = torch.zeros((1, 1, 1, 1), dtype=torch.int64)
    values = _four(p.bias_function(batch.view(-1, 1, 1, 1), heads.view(1, -1, 1, 1), one, one))
    return values.shape[0], values.shape[1]


def _four(values: Tensor) -> Tensor:
    return values.reshape((1,) * (4 - values.dim()) + tuple(values.shape)) if values.dim() < 4 else values


class _Room:
    """For the mask of a locality bias, tile after tile: fresh pages would cost as much as filling them."""

    def __init__(self, p: Problem, tiles: list[QueryTile]) -> None:
        largest = max((tile.keys * (tile.stop - tile.start) for tile in tiles), default=0)
        self._mask, self._difference = (p.q.new_empty(largest, dtype=_mask_dtype(p)) for _ in range(2))

    def mask(self, bias: LocalityBias, batch: slice, tile: QueryTile) -> Tensor:
        """[1, 1, Q, K]; valid until the next one is asked for."""
        shape = (1, tile.stop - tile.start, tile.keys)
        mask, difference = (room[: math.prod(shape)].view(shape) for room in (self._mask, self._difference))
        t, s = (points[None] if points.dim() == 2 else points[batch] for points in bias.tensors)
        bias.fill(mask, difference, t[..., tile.start : tile.stop], tile.take(s, 2))
        return mask[None]


def _mask_dtype(p: Problem) -> torch.dtype:
    return torch.float64 if p.q.dtype == torch.float64 else torch.float32


class _Tile:
    """One call of the kernel: some batch entries, all heads, one tile of queries."""

    def __init__(
        self, p: Problem, batch: slice, tile: QueryTile, seen_BK: Tensor | None, room: _Room | None
    ) -> None:
        self.p, self.batch, self.tile, self.seen_BK, self.room = p, batch, tile, seen_BK, room
        self.dtype = _mask_dtype(p)

    @property
    def is_all(self) -> bool:
        """Is this the only tile? Then what the kernel gives is the result, without a copy."""
        p, tile = self.p, self.tile
        whole = tile.index is None and (tile.start, tile.stop) == (0, p.queries) and tile.keys == p.keys
        return whole and self.batch.stop - self.batch.start == p.q.shape[0]

    def queries(self, tensor_BHQx: Tensor) -> Tensor:
        return tensor_BHQx[self.batch, :, self.tile.start : self.tile.stop]

    def keys(self, tensor_BGKx: Tensor) -> Tensor:
        return self.tile.take(tensor_BGKx[self.batch], 2)

    def mask(self) -> Tensor | None:
        """[b, h, Q, K] of sizes 1 or full, to be added to the scores."""
        p, tile = self.p, self.tile
        mask: Tensor | None = None
        heads = slice(0, p.q.shape[1])
        if p.bias is not None:
            mask = _with_contiguous_rows(bias_part(p.bias, self.batch, heads, tile).to(self.dtype))
        elif self.room is not None and isinstance(p.bias_function, LocalityBias):
            mask = self.room.mask(p.bias_function, self.batch, tile)
        elif p.bias_function is not None:
            mask = _with_contiguous_rows(_four(bias_values(p, self.batch, heads, tile)).to(self.dtype))
        forbidden: Tensor | None = None
        if tile.cut is not None and tile.cut < tile.keys:
            position = torch.arange(tile.start, tile.stop) + p.offset
            forbidden = (tile.key_index(p.q.device) > position[:, None])[None, None]
        if self.seen_BK is not None:
            padding = ~tile.take(self.seen_BK[self.batch], 1)[:, None, None, :]
            forbidden = padding if forbidden is None else forbidden | padding
        if forbidden is None:
            return mask
        if mask is None:
            return torch.zeros(forbidden.shape, dtype=self.dtype).masked_fill_(forbidden, -math.inf)
        if self.room is None:  # the mask may be a part of the caller's bias
            return mask.masked_fill(forbidden, -math.inf)
        return mask.masked_fill_(forbidden, -math.inf)


def _is_filled_in_place(p: Problem) -> bool:
    near = p.bias_function
    return isinstance(near, LocalityBias) and all(points.dtype == _mask_dtype(p) for points in near.tensors)


def _tiles(p: Problem) -> Iterator[_Tile]:
    seen_BK = p.seen_BK()
    batch = p.q.shape[0]
    # Where the mask differs over the batch, an entry at a time: so it stays as small as for one.
    step = 1 if seen_BK is not None or _bias_sizes(p)[0] > 1 else batch
    tiles = query_tiles(p, queries_per_tile(p))
    room = _Room(p, tiles) if _is_filled_in_place(p) else None
    for start in range(0, batch, step):
        for tile in tiles:
            if tile.keys:
                yield _Tile(p, slice(start, start + step), tile, seen_BK, room)


class _TiledCpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            out, lse_BHQ = cpu_forward(p)
        # The bias function keeps its tensors itself; saved, autograd notices where they were changed.
        ctx.save_for_backward(q, k, v, out, lse_BHQ, p.bias, p.key_lengths, p.key_mask, *p.bias_tensors)
        nothing = q.new_empty(0)
        rest: dict[str, Any] = {"q": nothing, "k": nothing, "v": nothing}
        ctx.problem = replace(p, **rest, bias=None, key_lengths=None, key_mask=None)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention")
        q, k, v, out, lse_BHQ, bias, key_lengths, key_mask, *_ = ctx.saved_tensors
        padding = {"key_lengths": key_lengths, "key_mask": key_mask}
        p = replace(ctx.problem, q=q, k=k, v=v, bias=bias, **padding)
        with torch.autocast("cpu", enabled=False):
            gradients = _backward(p, out, lse_BHQ, grad_out)
        wanted = zip(gradients, ctx.needs_input_grad[1:], strict=True)
        return None, *(gradient if want else None for gradient, want in wanted)


def _wide(tensor: Tensor) -> Tensor:
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return _with_contiguous_rows(wide)


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    """The kernel reads on from the first number of a row, whatever the stride."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def cpu_forward(p: Problem) -> tuple[Tensor, Tensor]:
    """(the result, the log-sum-exp of every row: 0 where it has no key)"""
    k, v = _wide(p.k), _wide(p.v)
    tiles = list(_tiles(p))
    if len(tiles) == 1 and tiles[0].is_all:
        part, lse = _kernel(p, tiles[0], k, v)
        return part.to(p.q.dtype), lse
    out = p.q.new_zeros(p.q.shape)
    lse_BHQ = out.new_zeros(p.q.shape[:3], dtype=k.dtype)
    for tile in tiles:
        part, lse = _kernel(p, tile, k, v)
        tile.queries(out).copy_(part)
        tile.queries(lse_BHQ).copy_(lse)
    return out, lse_BHQ


def _kernel(p: Problem, tile: _Tile, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    part, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        _wide(tile.queries(p.q)),
        tile.keys(k),
        tile.keys(v),
        0.0,
        False,
        attn_mask=tile.mask(),
        scale=p.scale,
    )
    return part, lse


def _backward(p: Problem, out: Tensor, lse_BHQ: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, v = _wide(p.k), _wide(p.v)
    tiles = list(_tiles(p))
    if len(tiles) == 1 and tiles[0].is_all:
        grad_q, grad_k, grad_v = _kernel_backward(p, tiles[0], k, v, out, lse_BHQ, grad_out)
        return grad_q.to(p.q.dtype), grad_k.to(p.k.dtype), grad_v.to(p.v.dtype)
    grad_q, grad_k, grad_v = torch.zeros_like(p.q), torch.zeros_like(k), torch.zeros_like(v)
    for tile in tiles:
        part_q, part_k, part_v = _kernel_backward(p, tile, k, v, out, lse_BHQ, grad_out)
        tile.queries(grad_q).copy_(part_q)
        tile.tile.add(grad_k[tile.batch], part_k, 2)
        tile.tile.add(grad_v[tile.batch], part_v, 2)
    return grad_q, grad_k.to(p.k.dtype), grad_v.to(p.v.dtype)


def _kernel_backward(
    p: Problem, tile: _Tile, k: Tensor, v: Tensor, out: Tensor, lse_BHQ: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    part_q, part_k, part_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _wide(tile.queries(grad_out)),
        _wide(tile.queries(p.q)),
        tile.keys(k),
        tile.keys(v),
        _wide(tile.queries(out)),
        tile.queries(lse_BHQ),
        0.0,
        False,
        attn_mask=tile.mask(),
        scale=p.scale,
    )
    return part_q, part_k, part_v
