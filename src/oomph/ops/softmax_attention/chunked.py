"""Attention in tiles of the scores, computed again in backward: plain torch, any device, linear memory.

Every tile holds whole rows of the softmax, so nothing has to be merged and nothing but q, k, v (and the bias)
is saved for backward; on a CPU, where forward runs in the fused kernel, also the log-sum-exp of the rows.
Scores, weights and all sums are fp32, or float64 for float64 inputs. On a GPU the factors of products stay in
half precision where the inputs are; elsewhere they are fp32 too.

B batch, H query heads, G key/value heads, Q and K lengths; a tile has Z = batch x key/value heads matrices of
R = (query heads per key/value head) x queries rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_compile, refuse_second_derivatives
from oomph.ops.softmax_attention.chunked_cpu import cpu_forward, fits_cpu_kernel
from oomph.ops.softmax_attention.problem import Problem
from oomph.ops.softmax_attention.tiles import QueryTile, bias_part, bias_values, query_tiles, tile_sizes


@no_compile
def chunked(p: Problem) -> Tensor:
    out: Tensor = _ChunkedAttention.apply(p, p.q, p.k, p.v, p.bias, *p.bias_tensors)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, eq=False)
class _Heads:
    """A rectangle of batch entries and key/value heads, with the `group` query heads of each."""

    batch: slice
    heads: slice
    group: int

    @property
    def query_heads(self) -> slice:
        return slice(self.heads.start * self.group, self.heads.stop * self.group)

    def rows(self, tensor_BHQx: Tensor, tile: QueryTile) -> Tensor:
        """[Z, R, x] of a tensor with query heads."""
        part = tensor_BHQx[self.batch, self.query_heads, tile.start : tile.stop]
        batch = part.shape[0] * (part.shape[1] // self.group)
        return part.reshape(batch, self.group * part.shape[2], part.shape[3])

    def unrows(self, tensor_ZRx: Tensor, tile: QueryTile) -> Tensor:
        """[batch, query heads, queries, x] of a tile's [Z, R, x]."""
        heads = (self.heads.stop - self.heads.start) * self.group
        return tensor_ZRx.reshape(-1, heads, tile.stop - tile.start, tensor_ZRx.shape[-1])

    def matrices(self, tensor_BGKx: Tensor, dtype: torch.dtype) -> Tensor:
        """[Z, K, x] of a tensor with key/value heads."""
        return tensor_BGKx[self.batch, self.heads].to(dtype).flatten(0, 1)


class _Buffers:
    """Room for two tiles of scores, used by every tile in turn: on a CPU fresh pages cost much time."""

    def __init__(self, p: Problem, tiles: list[QueryTile]) -> None:
        sizes = tile_sizes(p)
        rows = sizes.batch * sizes.heads * p.group
        largest = rows * max((tile.keys * (tile.stop - tile.start) for tile in tiles), default=0)
        self.dtype = _compute_dtype(p)
        self._scores, self._weights = (p.q.new_empty(largest, dtype=self.dtype) for _ in range(2))
        factor = _factor_dtype(p)
        self._narrow = None if factor == self.dtype else p.q.new_empty(largest, dtype=factor)

    def scores(self, rows: Tensor, columns: Tensor, scale: float = 1.0) -> Tensor:
        """rows_ZRx @ columns_ZKx^T * scale, in the first buffer."""
        shape = (rows.shape[0], rows.shape[1], columns.shape[1])
        place = self._scores[: math.prod(shape)].view(shape)
        if (
            rows.dtype == self.dtype and scale != 1.0
        ):  # the rows are smaller; in half precision they would round
            rows, scale = rows * scale, 1.0
        return _product(rows, columns.transpose(1, 2), self.dtype, scale, place)

    def softmax(self, scores_ZRK: Tensor, lse_ZR1: Tensor | None) -> Tensor:
        """In the second buffer; quicker where the log-sum-exp of the rows is known. May change the scores."""
        place = self._weights[: scores_ZRK.numel()].view(scores_ZRK.shape)
        if lse_ZR1 is None:
            return torch.softmax(scores_ZRK, -1, out=place)
        return torch.exp(scores_ZRK.sub_(lse_ZR1), out=place)

    def factor(self, tile_ZRK: Tensor) -> Tensor:
        """A tile in the dtype of the factors of products; in the third buffer where that is another one."""
        if self._narrow is None:
            return tile_ZRK
        return self._narrow[: tile_ZRK.numel()].view(tile_ZRK.shape).copy_(tile_ZRK)


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, p: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *bias_tensors: Tensor
    ) -> Tensor:
        # The tensors are kept by save_for_backward alone, so that a freed graph frees them. Those of a bias
        # function are its own: it must be called again, and reads no others. They are saved as well, so that
        # autograd notices where they were changed in the meantime.
        nothing = q.new_empty(0)
        ctx.problem = replace(p, q=nothing, k=nothing, v=nothing, bias=None, key_lengths=None, key_mask=None)
        lse_BHQ: Tensor | None = None
        with torch.autocast(q.device.type, enabled=False):
            if fits_cpu_kernel(p):
                out, lse_BHQ = cpu_forward(p)
            else:
                out = q.new_zeros((*q.shape[:3], v.shape[3]))
                _forward(p, out)
        ctx.save_for_backward(q, k, v, bias, p.key_lengths, p.key_mask, lse_BHQ, *bias_tensors)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention")
        q, k, v, bias, key_lengths, key_mask, lse_BHQ, *_ = ctx.saved_tensors
        p = replace(ctx.problem, q=q, k=k, v=v, bias=bias, key_lengths=key_lengths, key_mask=key_mask)
        with torch.autocast(q.device.type, enabled=False):
            return None, *_Backward(p, grad_out, lse_BHQ, ctx.needs_input_grad[1:]).run()


def _compute_dtype(p: Problem) -> torch.dtype:
    return torch.float64 if p.q.dtype == torch.float64 else torch.float32


def _factor_dtype(p: Problem) -> torch.dtype:
    return p.q.dtype if p.q.device.type == "cuda" else _compute_dtype(p)


def _product(
    a_ZRx: Tensor, b_ZxC: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """a @ b * scale in `dtype`, which may be wider than that of the factors."""
    if out is None:
        out = a_ZRx.new_empty((a_ZRx.shape[0], a_ZRx.shape[1], b_ZxC.shape[2]), dtype=dtype)
    if dtype == a_ZRx.dtype:
        torch.bmm(a_ZRx, b_ZxC, out=out)  # not baddbmm: on a CPU it multiplies one matrix at a time
    else:
        torch.bmm(a_ZRx, b_ZxC, out_dtype=dtype, out=out)
    return out if scale == 1.0 else out.mul_(scale)


def _head_tiles(p: Problem) -> Iterator[_Heads]:
    sizes = tile_sizes(p)
    for b in range(0, p.k.shape[0], sizes.batch):
        for g in range(0, p.k.shape[1], sizes.heads):
            batch, heads = min(b + sizes.batch, p.k.shape[0]), min(g + sizes.heads, p.k.shape[1])
            yield _Heads(slice(b, batch), slice(g, heads), p.group)


def _forward(p: Problem, out: Tensor) -> None:
    if 0 in (out.numel(), p.keys):
        return
    dtype = _factor_dtype(p)
    tiles = query_tiles(p, tile_sizes(p).queries)
    buffers = _Buffers(p, tiles)
    seen_BK = p.seen_BK()
    for heads in _head_tiles(p):
        k_ZKD, v_ZKE = heads.matrices(p.k, dtype), heads.matrices(p.v, dtype)
        for tile in tiles:
            if tile.keys == 0:
                continue
            q_ZRD = heads.rows(p.q, tile).to(dtype)
            weights_ZRK = _weights(p, buffers, heads, tile, q_ZRD, tile.take(k_ZKD, 1), seen_BK)
            out_ZRE = _product(buffers.factor(weights_ZRK), tile.take(v_ZKE, 1), dtype)
            out[heads.batch, heads.query_heads, tile.start : tile.stop] = heads.unrows(out_ZRE, tile)


def _weights(
    p: Problem,
    buffers: _Buffers,
    heads: _Heads,
    tile: QueryTile,
    q_ZRD: Tensor,
    k_ZKD: Tensor,
    seen_BK: Tensor | None,
    lse_ZR1: Tensor | None = None,
) -> Tensor:
    """The softmax of one tile; rows without a key are zeros."""
    scores_ZRK = buffers.scores(q_ZRD, k_ZKD, p.scale)
    scores_BHQK = heads.unrows(scores_ZRK, tile)  # a view
    if p.bias is not None:
        scores_BHQK.add_(bias_part(p.bias, heads.batch, heads.query_heads, tile))
    elif p.bias_function is not None:
        scores_BHQK.add_(bias_values(p, heads.batch, heads.query_heads, tile))
    if tile.cut is not None and tile.cut < tile.keys:
        k_index = tile.key_index(p.q.device)[tile.cut :]
        position = torch.arange(tile.start, tile.stop, device=p.q.device) + p.offset
        scores_BHQK[..., tile.cut :].masked_fill_(k_index > position[:, None], -math.inf)
    if seen_BK is not None:
        seen = tile.take(seen_BK[heads.batch], 1)
        scores_BHQK.masked_fill_(~seen[:, None, None, :], -math.inf)
    weights_ZRK = buffers.softmax(scores_ZRK, lse_ZR1)
    if lse_ZR1 is None and _may_lack_keys(p):
        without_key_ZR1 = scores_ZRK.amax(-1, keepdim=True) == -math.inf
        weights_ZRK.masked_fill_(without_key_ZR1, 0.0)
    return weights_ZRK


def _may_lack_keys(p: Problem) -> bool:
    biased = p.bias is not None or p.bias_function is not None  # which may be -inf everywhere
    return biased or p.padded or (p.causal and p.offset < 0)


class _Sums:
    """The gradient of k or v for a rectangle of heads, added up in the compute dtype.

    In place where that is the gradient's own dtype: another copy would grow with the number of keys.
    """

    def __init__(self, total_BGKx: Tensor, heads: _Heads, dtype: torch.dtype) -> None:
        self.place = total_BGKx[heads.batch, heads.heads]
        batch, head = self.place.stride()[:2]
        is_flat = self.place.shape[0] == 1 or batch == head * self.place.shape[1]
        self.in_place = is_flat and self.place.dtype == dtype
        if self.in_place:
            self.sums_ZKx = self.place.flatten(0, 1)  # a view
        else:
            shape = (self.place.shape[0] * self.place.shape[1], *self.place.shape[2:])
            self.sums_ZKx = self.place.new_zeros(shape, dtype=dtype)

    def add(self, tile: QueryTile, a_ZkR: Tensor, b_ZRx: Tensor, scale: float = 1.0) -> None:
        """sums[keys of the tile] += a @ b * scale"""
        sums = self.sums_ZKx
        if tile.index is None and sums.shape[0] == 1 and sums.dtype == a_ZkR.dtype:  # no room for the product
            tile.take(sums, 1)[0].addmm_(a_ZkR[0], b_ZRx[0], alpha=scale)
        else:
            tile.add(sums, _product(a_ZkR, b_ZRx, sums.dtype, scale), 1)

    def finish(self) -> None:
        if not self.in_place:
            self.place.copy_(self.sums_ZKx.view(self.place.shape))


class _Backward:
    """One backward pass: the gradients that are wanted, filled tile by tile."""

    def __init__(
        self, p: Problem, grad_out: Tensor, lse_BHQ: Tensor | None, wanted: tuple[bool, ...]
    ) -> None:
        self.p, self.grad_out = p, grad_out
        self.lse_BHQ1 = None if lse_BHQ is None else lse_BHQ[..., None]
        self.dtype, self.factor_dtype = _compute_dtype(p), _factor_dtype(p)
        self.seen_BK = p.seen_BK()
        self.want_q, self.want_k, self.want_v, self.want_bias = wanted[:4]
        self.bias_tensors = [t for t, want in zip(p.bias_tensors, wanted[4:], strict=True) if want]
        self.wanted_tensors = wanted[4:]
        self.want_scores = self.want_q or self.want_k or self.want_bias or bool(self.bias_tensors)
        self.grad_q = torch.zeros_like(p.q) if self.want_q else None
        self.grad_k = torch.zeros_like(p.k) if self.want_k else None
        self.grad_v = torch.zeros_like(p.v) if self.want_v else None
        self.grad_bias: Tensor | None = None
        if self.want_bias and p.bias is not None:
            self.grad_bias = torch.zeros_like(p.bias, dtype=self.dtype)
        # Sums over many tiles: in half precision they would stop growing.
        self.grad_tensors = [
            torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in self.bias_tensors
        ]

    def run(self) -> list[Tensor | None]:
        p = self.p
        if 0 not in (self.grad_out.numel(), p.keys):
            tiles = query_tiles(p, tile_sizes(p).queries)
            buffers = _Buffers(p, tiles)
            for heads in _head_tiles(p):
                self._heads(buffers, heads, tiles)
        grad_bias = None if self.grad_bias is None or p.bias is None else self.grad_bias.to(p.bias.dtype)
        rest = (total.to(t.dtype) for total, t in zip(self.grad_tensors, self.bias_tensors, strict=True))
        others = [next(rest) if want else None for want in self.wanted_tensors]
        return [self.grad_q, self.grad_k, self.grad_v, grad_bias, *others]

    def _heads(self, buffers: _Buffers, heads: _Heads, tiles: list[QueryTile]) -> None:
        factor = self.factor_dtype
        k_ZKD, v_ZKE = heads.matrices(self.p.k, factor), heads.matrices(self.p.v, factor)
        sums = [
            None if total is None else _Sums(total, heads, self.dtype) for total in (self.grad_k, self.grad_v)
        ]
        for tile in tiles:
            if tile.keys:
                self._tile(buffers, heads, tile, k_ZKD, v_ZKE, *sums)
        for each in sums:
            if each is not None:
                each.finish()

    def _tile(
        self,
        buffers: _Buffers,
        heads: _Heads,
        tile: QueryTile,
        k_ZKD: Tensor,
        v_ZKE: Tensor,
        grad_k: "_Sums | None",
        grad_v: "_Sums | None",
    ) -> None:
        p, factor = self.p, self.factor_dtype
        q_ZRD = heads.rows(p.q, tile).to(factor)
        k_ZkD = tile.take(k_ZKD, 1)
        grad_out_ZRE = heads.rows(self.grad_out, tile).to(factor)
        lse_ZR1 = None if self.lse_BHQ1 is None else heads.rows(self.lse_BHQ1, tile)
        weights_ZRk = _weights(p, buffers, heads, tile, q_ZRD, k_ZkD, self.seen_BK, lse_ZR1)
        if grad_v is not None:
            grad_v.add(tile, buffers.factor(weights_ZRk).transpose(1, 2), grad_out_ZRE)
        if not self.want_scores:
            return
        grad_ZRk = buffers.scores(grad_out_ZRE, tile.take(v_ZKE, 1))  # the scores themselves are done with
        # Of the softmax: w * (g - sum(w * g)), in place.
        grad_ZRk.mul_(weights_ZRk)
        total_ZR1 = grad_ZRk.sum(-1, keepdim=True)
        grad_ZRk.addcmul_(weights_ZRk, total_ZR1, value=-1.0)
        narrow_ZRk = buffers.factor(grad_ZRk) if self.want_q or self.want_k else grad_ZRk
        if self.grad_q is not None:
            grad_q_ZRD = _product(narrow_ZRk, k_ZkD, factor, p.scale)
            place = self.grad_q[heads.batch, heads.query_heads, tile.start : tile.stop]
            place.copy_(heads.unrows(grad_q_ZRD, tile))
        if grad_k is not None:
            grad_k.add(tile, narrow_ZRk.transpose(1, 2), q_ZRD, p.scale)
        if self.grad_bias is not None:
            self._add_to_bias(self.grad_bias, heads, tile, heads.unrows(grad_ZRk, tile))
        if self.bias_tensors:
            self._add_to_bias_tensors(heads, tile, heads.unrows(grad_ZRk, tile))

    @staticmethod
    def _add_to_bias(total: Tensor, heads: _Heads, tile: QueryTile, grad_BHQK: Tensor) -> None:
        broadcast = [dim for dim, size in enumerate(total.shape) if size == 1]
        part = grad_BHQK.sum(broadcast, keepdim=True) if broadcast else grad_BHQK
        batch = heads.batch if total.shape[0] > 1 else slice(None)
        head = heads.query_heads if total.shape[1] > 1 else slice(None)
        query = slice(tile.start, tile.stop) if total.shape[2] > 1 else slice(None)
        if total.shape[3] > 1:
            tile.add(total[batch, head, query], part, 3)
        else:
            total[batch, head, query].add_(part)

    def _add_to_bias_tensors(self, heads: _Heads, tile: QueryTile, grad_BHQK: Tensor) -> None:
        with torch.enable_grad():
            values = bias_values(self.p, heads.batch, heads.query_heads, tile)
        if not values.requires_grad:
            return
        grad = grad_BHQK.sum_to_size(values.shape).to(values.dtype)
        parts = torch.autograd.grad(values, self.bias_tensors, grad, allow_unused=True)
        for total, part in zip(self.grad_tensors, parts, strict=True):
            if part is not None:
                total.add_(part)
