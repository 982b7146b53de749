"""Starts the kernels for compressed keys and for the window: forward, dq, and the gradients of the keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.sparse_attention.tensors import LOG2_E, SMALLEST_TILE, Tile, cdiv, power_of_two, strided

_KERNELS = Kernels("oomph.ops.sparse_attention.banded.triton")


@dataclass(frozen=True)
class Band:
    """Key j stands for tokens j * stride .. j * stride + span - 1; a token sees it when past and near."""

    span: int = 1
    stride: int = 1
    window: int = 0  # in tokens; 0: no limit

    def constants(self, width: int) -> dict[str, Any]:
        return {
            "SPAN": self.span,
            "STRIDE": self.stride,
            "WINDOW": self.window,
            "BLOCK_D": power_of_two(width, SMALLEST_TILE),
            "PRECISION": "ieee",
        }


@dataclass(frozen=True)
class Tiles:
    """Tokens x keys of the three kernels."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


def tiles(dtype: torch.dtype, width: int) -> Tiles:
    # The largest that fit into the registers of an H200.
    if dtype == torch.float32:  # multiplied exactly, without tensor cores
        small = (
            Tile(16, 16, 4, 1) if width > 128 else Tile(32, 32, 4, 1) if width <= 64 else Tile(16, 32, 4, 1)
        )
        return Tiles(small, small, small)
    if width <= 64:
        return Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    if width <= 128:
        return Tiles(Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3))
    return Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(16, 64, 8, 2))


@dataclass(frozen=True)
class Rows:
    """Numbers of each token and query head, [B, Q, T] in float32."""

    lse: Tensor
    delta: Tensor
    gate: Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """The result [B, T, Q, D] and its log-sum-exp [B, Q, T]."""
    batch, tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    tile = tiles(q.dtype, width).forward
    _KERNELS.launch(
        "band_forward",
        (cdiv(tokens, tile.rows) * batch * heads,),
        *strided(q),
        *strided(k),
        *strided(v),
        out,
        lse,
        *_sizes(q, k),
        scale * LOG2_E,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **band.constants(width),
        **tile.run,
    )
    return out, lse


def query_gradient(
    dq: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    rows: Rows,
    band: Band,
    scale: float,
    *,
    add: bool,
) -> None:
    """Into dq, or on top of what it holds."""
    batch, tokens, heads, width = q.shape
    tile = tiles(q.dtype, width).query_gradient
    _KERNELS.launch(
        "band_query_gradient",
        (cdiv(tokens, tile.rows) * batch * heads,),
        *strided(q),
        *strided(k),
        *strided(v),
        *strided(grad),
        dq,
        rows.lse,
        rows.delta,
        rows.gate,
        *_sizes(q, k),
        scale * LOG2_E,
        scale,
        ADD=add,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **band.constants(width),
        **tile.run,
    )


def key_gradient(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rows: Rows, band: Band, scale: float, *, split: bool
) -> tuple[Tensor, Tensor]:
    """dk and dv. `split`: a program per query head, for few keys that many tokens see; summed afterwards."""
    batch, _, heads, width = q.shape
    n_keys, key_heads = k.shape[1:3]
    group = heads // key_heads
    split = split and group > 1
    shape = (batch, n_keys, heads if split else key_heads, width)
    dtype = torch.float32 if split else k.dtype
    dk, dv = (torch.empty(shape, dtype=dtype, device=k.device) for _ in "kv")
    tile = tiles(q.dtype, width).key_gradient
    _KERNELS.launch(
        "band_key_gradient",
        (cdiv(n_keys, tile.columns) * batch * shape[2],),
        *strided(q),
        *strided(k),
        *strided(v),
        *strided(grad),
        dk,
        dv,
        rows.lse,
        rows.delta,
        rows.gate,
        *_sizes(q, k),
        scale * LOG2_E,
        scale,
        HEADS=1 if split else group,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        **band.constants(width),
        **tile.run,
    )
    if not split:
        return dk, dv
    grouped = (batch, n_keys, key_heads, group, width)
    dk = dk.view(grouped).sum(3).to(k.dtype)
    return dk, dv.view(grouped).sum(3).to(v.dtype)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    return q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2], q.shape[3]
