"""Block patterns and padding through our own Triton kernels: forward, and backward without atomics.

Saved for backward: the inputs, the result and one fp32 number per row (its log-sum-exp).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import no_compile, refuse_second_derivatives
from oomph.ops.launch import Kernels, why_not_triton
from oomph.ops.softmax_attention.biases import BiasFunction, LocalityBias
from oomph.ops.softmax_attention.problem import Problem

_KERNELS = Kernels("oomph.ops.softmax_attention.triton")
_LOG2_E = math.log2(math.e)
_DENSE_BLOCK = 128  # positions of a block where there is no pattern: a multiple of every tile
_SMALLEST_TILE = 16
_WIDEST_HEAD = 256
_MOST_COORDINATES = 8  # of a point; the loop over them is written out in the kernels
_ROWS = 64  # of one program that adds up out * grad
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tile:
    """Queries x keys that a program multiplies at a time, and how it is run."""

    queries: int
    keys: int
    warps: int
    stages: int

    def within(self, block: int, *, align_queries: bool) -> "Tile":
        """The largest tile up to this one whose sides divide a pattern's block."""
        side = block & -block  # the largest power of two that divides it
        queries = min(self.queries, side) if align_queries else self.queries
        # Four warps share up to 64 rows of a product; more would have to split its columns.
        warps = self.warps if queries == self.queries else 4
        return Tile(queries, min(self.keys, side), warps, self.stages)


@dataclass(frozen=True)
class Tiles:
    """Of the three kernels with matrix products."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


def tiles(dtype: torch.dtype, head_size: int, block: int | None, *, points: bool = False) -> Tiles:
    """For heads of `head_size`, a pattern's block (None: no pattern), with or without points."""
    largest = _largest_tiles(dtype, head_size, points)
    if block is None:
        return largest
    return Tiles(
        largest.forward.within(block, align_queries=True),
        largest.query_gradient.within(block, align_queries=True),
        largest.key_gradient.within(block, align_queries=False),
    )


def _largest_tiles(dtype: torch.dtype, head_size: int, points: bool) -> Tiles:
    # The largest that fit into the registers of an H200 without spilling (or with a few bytes of it).
    if dtype == torch.float32:  # multiplied exactly, without tensor cores
        if head_size <= 64:
            return Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
        if head_size <= 128:
            return Tiles(Tile(16, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 32, 4, 1))
        return Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))
    if head_size <= 64 and points:  # distances take the registers of larger tiles: by measurement
        return Tiles(Tile(128, 64, 4, 3), Tile(64, 128, 4, 2), Tile(64, 64, 4, 2))
    if head_size <= 64:
        return Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    if head_size <= 128:
        return Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(32, 128, 8, 2))
    return Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2))


def why_not_kernels(p: Problem) -> str | None:
    """Why these kernels cannot run the call; None where they can."""
    objection = why_not_triton(p.q)
    if objection is not None:
        return objection
    if p.bias is not None:
        return "a bias"
    if p.bias_function is not None:
        objection = _bias_objection(p.bias_function, p.bias_needs_grad)
        if objection is not None:
            return objection
    if p.q.dtype not in _DTYPES:
        return f"no {str(p.q.dtype).removeprefix('torch.')} kernel"
    if 0 in (p.q.numel(), p.k.numel(), p.v.numel()):
        return "an empty tensor"
    if max(p.q.shape[3], p.v.shape[3]) > _WIDEST_HEAD:
        return f"head sizes above {_WIDEST_HEAD}"
    if p.pattern is not None and p.pattern.block % _SMALLEST_TILE:
        return f"blocks that are no multiple of {_SMALLEST_TILE}"
    return None


def _bias_objection(bias: BiasFunction, needs_grad: bool) -> str | None:
    if not isinstance(bias, LocalityBias):
        return "a bias function other than locality_bias"
    if needs_grad:
        return "the points of the bias need a gradient"
    points = (bias.query_points, bias.key_points)
    if any(each.dtype != torch.float32 for each in points):
        return "points that are not float32"
    if bias.query_points.shape[-2] > _MOST_COORDINATES:
        return f"points of more than {_MOST_COORDINATES} coordinates"
    return None


@no_compile
def triton_attention(p: Problem) -> Tensor:
    out: Tensor = _TritonAttention.apply(p, p.q, p.k, p.v)  # type: ignore[no-untyped-call]
    return out


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_with_contiguous_rows(tensor) for tensor in (q, k, v))
        out = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
        lse_BHQ = q.new_empty(q.shape[:3], dtype=torch.float32)
        call = _Call(p, q, k, v)
        tile = call.tiles.forward
        arguments = (*_strided(q), *_strided(k), *_strided(v), *_strided(out), lse_BHQ, *call.common)
        flops = call.flops(2)
        _KERNELS.launch("forward", (call.query_tiles(tile),), *arguments, flops=flops, **call.constants(tile))
        # The points of a bias are kept by it; saved, autograd notices where they were changed.
        ctx.save_for_backward(q, k, v, out, lse_BHQ, p.key_lengths, p.key_mask, *p.bias_tensors)
        # The tensors are kept by save_for_backward alone, so that a freed graph frees them.
        nothing = q.new_empty(0)
        ctx.problem = replace(p, q=nothing, k=nothing, v=nothing, key_lengths=None, key_mask=None)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention")
        q, k, v, out, lse_BHQ, key_lengths, key_mask, *_ = ctx.saved_tensors
        p = replace(ctx.problem, q=q, k=k, v=v, key_lengths=key_lengths, key_mask=key_mask)
        _, want_q, want_k, want_v = ctx.needs_input_grad
        grad = _with_contiguous_rows(grad_out)
        delta_BHQ = torch.empty_like(lse_BHQ)
        heads, queries, width = out.shape[1:]
        programs = q.shape[0] * heads * -(-queries // _ROWS)
        _KERNELS.launch(
            "row_products",
            (programs,),
            *_strided(out),
            *_strided(grad),
            delta_BHQ,
            queries,
            heads,
            width,
            ROWS=_ROWS,
            BLOCK_E=_power_of_two(width),
        )
        call = _Call(p, q, k, v)
        inputs = (*_strided(q), *_strided(k), *_strided(v), *_strided(grad))
        rest = (lse_BHQ, delta_BHQ, *call.common)
        dq = dk = dv = None
        if want_q:
            dq, tile = torch.empty_like(q), call.tiles.query_gradient
            grid = (call.query_tiles(tile),)
            arguments = (*inputs, *_strided(dq), *rest)
            flops = call.flops(3)
            _KERNELS.launch("query_gradient", grid, *arguments, flops=flops, **call.constants(tile))
        if want_k or want_v:
            dk, dv, tile = torch.empty_like(k), torch.empty_like(v), call.tiles.key_gradient
            both = (*_strided(dk), *_strided(dv))
            grid = (call.key_tiles(tile),)
            arguments = (*inputs, *both, *rest)
            flops = call.flops(4)
            _KERNELS.launch("key_gradient", grid, *arguments, flops=flops, **call.constants(tile))
        return None, dq, dk if want_k else None, dv if want_v else None


class _Call:
    """What the kernels are told besides the tensors."""

    def __init__(self, p: Problem, q: Tensor, k: Tensor, v: Tensor) -> None:
        pattern = p.pattern
        self.p = p
        self.block = _DENSE_BLOCK if pattern is None else pattern.block
        everything = -(-p.keys // self.block) + -(-p.queries // self.block) + 1
        window, stride = everything, 1
        if pattern is not None:
            window = 0 if pattern.kind == "global" else min(pattern.window, everything)
            stride = min(pattern.stride, everything)
        self.has_global = pattern is not None and pattern.kind != "local"
        self.width = (_power_of_two(q.shape[3]), _power_of_two(v.shape[3]))
        # A kernel must be given some tensor even where it reads none.
        lengths, seen = (q if t is None else t for t in (p.key_lengths, p.key_mask))
        points: tuple[Tensor | int, ...] = (q, 0, q, 0)
        self.point_size, strength = 0, 0.0
        if isinstance(p.bias_function, LocalityBias):
            near = p.bias_function
            points = (*_batched(near.query_points), *_batched(near.key_points))
            self.point_size, strength = near.query_points.shape[-2], near.strength * _LOG2_E
        block = None if pattern is None else pattern.block
        self.tiles = tiles(q.dtype, max(self.width), block, points=self.point_size > 0)
        self.common = (
            lengths,
            seen if seen is q else seen.contiguous(),
            *points,
            p.queries,
            p.keys,
            q.shape[1],
            p.group,
            q.shape[3],
            v.shape[3],
            window,
            stride,
            p.scale * _LOG2_E,
            strength,
        )

    def constants(self, tile: Tile) -> dict[str, Any]:
        return {
            "CAUSAL": self.p.cuts_future,
            "HAS_LENGTHS": self.p.key_lengths is not None,
            "HAS_MASK": self.p.key_mask is not None,
            "HAS_GLOBAL": self.has_global,
            "BLOCK": self.block,
            "BLOCK_M": tile.queries,
            "BLOCK_N": tile.keys,
            "BLOCK_D": self.width[0],
            "BLOCK_E": self.width[1],
            "POINT_SIZE": self.point_size,
            "PRECISION": "ieee",
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def flops(self, products: int) -> float:
        """Of so many products over the pairs of queries and keys that are seen; for predictions of time."""
        p = self.p
        seen = 0.5 if p.cuts_future else 1.0
        keys = seen * p.keys
        if p.pattern is not None:
            near = 0 if p.pattern.kind == "global" else 2 * seen * p.pattern.window
            far = 0 if p.pattern.kind == "local" else keys / p.pattern.stride
            keys = min(keys, (near + 1) * p.pattern.block + far)
        width = (p.q.shape[3] + p.v.shape[3]) / 2
        return 2.0 * products * p.q.shape[0] * p.q.shape[1] * p.queries * keys * width

    def query_tiles(self, tile: Tile) -> int:
        """Programs over tiles that begin at multiples of their height among the positions."""
        p = self.p
        per_head = (p.keys - 1) // tile.queries - p.offset // tile.queries + 1
        return p.q.shape[0] * p.q.shape[1] * per_head

    def key_tiles(self, tile: Tile) -> int:
        return self.p.k.shape[0] * self.p.k.shape[1] * -(-self.p.keys // tile.keys)


def _batched(points: Tensor) -> tuple[Tensor, int]:
    """Points [d, N] or [B, d, N], and how far apart two batch entries lie."""
    points = points.contiguous()
    return points, points.stride(0) if points.dim() == 3 else 0


def _strided(tensor: Tensor) -> tuple[Tensor, int, int, int]:
    return tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _power_of_two(size: int) -> int:
    return max(_SMALLEST_TILE, 1 << (size - 1).bit_length())
