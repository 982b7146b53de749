"""Block patterns, padding and the locality bias through our Triton kernels, without atomics.

Saved for backward: the inputs, the result and one fp32 number per row (its log-sum-exp).
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oomph.ops.common import (
    Kernels,
    OpFunction,
    TileConfig,
    contiguous_rows,
    power_of_two,
    refuse_second_derivatives,
    strided,
    why_not_triton,
)
from oomph.ops.softmax_attention.arguments import AttentionArguments, BiasFunction, LocalityBias

_KERNELS = Kernels("oomph.ops.softmax_attention.kernels")
_LOG2_E = math.log2(math.e)
_DENSE_BLOCK = 128  # positions per block without a pattern: a multiple of every tile
_MIN_TILE = 16
_MAX_HEAD_SIZE = 256
_MAX_POINT_SIZE = 8  # the kernels unroll the loop over coordinates
_DELTA_ROWS = 64  # rows per program of attention_delta
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _fit_block(tile: TileConfig, block: int, *, align_queries: bool) -> TileConfig:
    """The largest tile of queries x keys up to this one whose sides divide a pattern's block."""
    side = block & -block  # the largest power of two that divides it
    queries = min(tile.rows, side) if align_queries else tile.rows
    # Four warps share up to 64 rows of a product; more would have to split its columns.
    warps = tile.warps if queries == tile.rows else 4
    return TileConfig(queries, min(tile.columns, side), warps, tile.stages)


def tile_configs(
    dtype: torch.dtype, head_size: int, block: int | None, *, points: bool = False
) -> tuple[TileConfig, TileConfig, TileConfig]:
    """Of forward, dq, and dk with dv, for a pattern's block (None: no pattern), with or without points."""
    forward, dq, dkdv = _largest_tiles(dtype, head_size, points)
    if block is None:
        return forward, dq, dkdv
    return (
        _fit_block(forward, block, align_queries=True),
        _fit_block(dq, block, align_queries=True),
        _fit_block(dkdv, block, align_queries=False),
    )


def _largest_tiles(
    dtype: torch.dtype, head_size: int, points: bool
) -> tuple[TileConfig, TileConfig, TileConfig]:
    # The largest that fit into the registers of an H200 with little or no spilling.
    if dtype == torch.float32:  # exact products, without tensor cores
        if head_size <= 64:
            return (TileConfig(32, 32, 4, 1),) * 3
        if head_size <= 128:
            return TileConfig(16, 32, 4, 1), TileConfig(16, 32, 4, 1), TileConfig(32, 32, 4, 1)
        return (TileConfig(16, 16, 4, 1),) * 3
    if head_size <= 64 and points:  # distances take registers; sizes by measurement
        return TileConfig(128, 64, 4, 3), TileConfig(64, 128, 4, 2), TileConfig(64, 64, 4, 2)
    if head_size <= 64:
        return TileConfig(128, 64, 4, 3), TileConfig(128, 64, 8, 2), TileConfig(64, 128, 8, 2)
    if head_size <= 128:
        return TileConfig(128, 64, 8, 3), TileConfig(128, 64, 8, 2), TileConfig(32, 128, 8, 2)
    return TileConfig(64, 32, 4, 2), TileConfig(64, 32, 8, 2), TileConfig(16, 64, 8, 2)


def why_not_kernels(a: AttentionArguments) -> str | None:
    """Why the kernels cannot run the call; None where they can."""
    reason = why_not_triton(a.q, a.q.dtype)
    if reason is not None:
        return reason
    if a.bias is not None:
        return "a bias"
    if a.bias_function is not None:
        reason = _why_not_bias(a.bias_function, a.bias_needs_grad)
        if reason is not None:
            return reason
    if a.q.dtype not in _DTYPES:
        return f"no {str(a.q.dtype).removeprefix('torch.')} kernel"
    if a.has_empty:
        return "an empty tensor"
    if max(a.q.shape[3], a.v.shape[3]) > _MAX_HEAD_SIZE:
        return f"head sizes above {_MAX_HEAD_SIZE}"
    if a.pattern is not None and a.pattern.block % _MIN_TILE:
        return f"blocks that are no multiple of {_MIN_TILE}"
    return None


def _why_not_bias(bias: BiasFunction, needs_grad: bool) -> str | None:
    if not isinstance(bias, LocalityBias):
        return "a bias function other than locality_bias"
    if needs_grad:
        return "the points of the bias need a gradient"
    if any(points.dtype != torch.float32 for points in bias.tensors):
        return "points that are not float32"
    if bias.query_points.shape[-2] > _MAX_POINT_SIZE:
        return f"points of more than {_MAX_POINT_SIZE} coordinates"
    return None


class TritonAttention(OpFunction):
    op = "attention"

    @staticmethod
    def forward(ctx: Any, a: AttentionArguments, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (contiguous_rows(tensor) for tensor in (q, k, v))
        out = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))
        lse_BHQ = q.new_empty(q.shape[:3], dtype=torch.float32)
        launch = _LaunchArguments(a, q, k, v)
        tile = launch.tiles[0]
        _KERNELS.launch(
            "attention_forward",
            (launch.query_programs(tile),),
            *(*strided(q), *strided(k), *strided(v), *strided(out), lse_BHQ, *launch.common),
            flops=launch.flops(2),
            **launch.constants(tile),
        )
        # The bias holds its points; saved as well, autograd detects in-place changes to them.
        ctx.save_for_backward(q, k, v, out, lse_BHQ, a.key_mask, *a.bias_tensors)
        ctx.arguments = a.without_tensors()
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives("attention")
        q, k, v, out, lse_BHQ, key_mask, *_ = ctx.saved_tensors
        a = replace(ctx.arguments, q=q, k=k, v=v, key_mask=key_mask)
        _, want_q, want_k, want_v = ctx.needs_input_grad
        grad = contiguous_rows(grad_out)
        delta_BHQ = torch.empty_like(lse_BHQ)
        batch, heads, queries, head_size = out.shape
        _KERNELS.launch(
            "attention_delta",
            (batch * heads * -(-queries // _DELTA_ROWS),),
            *(*strided(out), *strided(grad), delta_BHQ, queries, heads, head_size),
            ROWS=_DELTA_ROWS,
            BLOCK_E=power_of_two(head_size, _MIN_TILE),
        )
        launch = _LaunchArguments(a, q, k, v)
        inputs = (*strided(q), *strided(k), *strided(v), *strided(grad))
        rest = (lse_BHQ, delta_BHQ, *launch.common)
        dq = dk = dv = None
        if want_q:
            dq, tile = torch.empty_like(q), launch.tiles[1]
            _KERNELS.launch(
                "attention_dq",
                (launch.query_programs(tile),),
                *(*inputs, *strided(dq), *rest),
                flops=launch.flops(3),
                **launch.constants(tile),
            )
        if want_k or want_v:
            dk, dv, tile = torch.empty_like(k), torch.empty_like(v), launch.tiles[2]
            _KERNELS.launch(
                "attention_dkdv",
                (launch.key_programs(tile),),
                *(*inputs, *strided(dk), *strided(dv), *rest),
                flops=launch.flops(4),
                **launch.constants(tile),
            )
        return None, dq, dk if want_k else None, dv if want_v else None


class _LaunchArguments:
    """Arguments that the kernels share."""

    def __init__(self, a: AttentionArguments, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.a, pattern = a, a.pattern
        self.block = _DENSE_BLOCK if pattern is None else pattern.block
        all_blocks = -(-a.keys // self.block) + -(-a.queries // self.block) + 1
        window, stride = all_blocks, 1
        if pattern is not None:
            window = 0 if pattern.kind == "global" else min(pattern.window, all_blocks)
            stride = min(pattern.stride, all_blocks)
        self.has_global = pattern is not None and pattern.kind != "local"
        self.padded_sizes = (power_of_two(q.shape[3], _MIN_TILE), power_of_two(v.shape[3], _MIN_TILE))
        # q stands in for tensors that a kernel, given its constants, does not read.
        key_mask = q if a.key_mask is None else a.key_mask.contiguous()
        points: tuple[Tensor | int, ...] = (q, 0, q, 0)
        self.point_size, strength = 0, 0.0
        if isinstance(a.bias_function, LocalityBias):
            bias = a.bias_function
            points = (*_batched(bias.query_points), *_batched(bias.key_points))
            self.point_size, strength = bias.query_points.shape[-2], bias.strength * _LOG2_E
        block = None if pattern is None else pattern.block
        self.tiles = tile_configs(q.dtype, max(self.padded_sizes), block, points=self.point_size > 0)
        self.common = (
            *(key_mask, *points),
            *(a.queries, a.keys, q.shape[1], a.group, q.shape[3], v.shape[3], window, stride),
            *(a.scale * _LOG2_E, strength),
        )

    def constants(self, tile: TileConfig) -> dict[str, Any]:
        return {
            "CAUSAL": self.a.masks_future,
            "HAS_MASK": self.a.key_mask is not None,
            "HAS_GLOBAL": self.has_global,
            "BLOCK": self.block,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_D": self.padded_sizes[0],
            "BLOCK_E": self.padded_sizes[1],
            "POINT_SIZE": self.point_size,
            "PRECISION": "ieee",
            **tile.launch_options,
        }

    def flops(self, products: int) -> float:
        """Of so many products over the attended pairs of queries and keys; for predictions of time."""
        a = self.a
        share = 0.5 if a.masks_future else 1.0
        keys = share * a.keys
        if a.pattern is not None:
            near = 0 if a.pattern.kind == "global" else 2 * share * a.pattern.window
            far = 0 if a.pattern.kind == "local" else keys / a.pattern.stride
            keys = min(keys, (near + 1) * a.pattern.block + far)
        head_size = (a.q.shape[3] + a.v.shape[3]) / 2
        return 2.0 * products * a.q.shape[0] * a.q.shape[1] * a.queries * keys * head_size

    def query_programs(self, tile: TileConfig) -> int:
        """Tiles begin at multiples of their height among the positions."""
        a = self.a
        per_head = (a.keys - 1) // tile.rows - a.offset // tile.rows + 1
        return a.q.shape[0] * a.q.shape[1] * per_head

    def key_programs(self, tile: TileConfig) -> int:
        return self.a.k.shape[0] * self.a.k.shape[1] * -(-self.a.keys // tile.columns)


def _batched(points: Tensor) -> tuple[Tensor, int]:
    """Points [d, N] or [B, d, N], and their batch stride."""
    points = points.contiguous()
    return points, points.stride(0) if points.dim() == 3 else 0
