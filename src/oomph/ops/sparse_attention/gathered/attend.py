"""Starts the kernels for selected blocks, a segment of tokens at a time where they leave parts to add up."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.sparse_attention.pairs.index import (
    Index,
    Work,
    make_index,
    segment_of,
    work_of_all,
    work_of_segments,
)
from oomph.ops.sparse_attention.problem import Sizes
from oomph.ops.sparse_attention.tensors import LOG2_E, SMALLEST_TILE, Tile, cdiv, power_of_two, strided

_KERNELS = Kernels("oomph.ops.sparse_attention.gathered.triton")
# Parts held at a time, as a share of the queries' bytes: forward has more room than backward.
_FORWARD_SHARE, _BACKWARD_SHARE = 1.0, 0.5
_ROWS_OF_PIECE = 512  # of forward and dq
_ROWS_OF_LONG_PIECE = 32768  # of dk and dv: work beyond it goes to `more`, an eighth of the queries' bytes
_ROWS_ADDED = 16  # of one program that adds up parts


@dataclass(frozen=True, eq=False)
class Branches:
    """What the other branches gave, and the gates [B, T, Q], to be added up with this one."""

    compressed: Tensor
    nearby: Tensor
    gates: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """Numbers of each token and query head, [B, T, Q]."""

    lse: Tensor
    delta: Tensor
    gate: Tensor


class Gathered:
    """One call's sizes, and its list of pairs."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, sizes: Sizes, *, backward: bool
    ) -> None:
        self.q, self.k, self.v, self.chosen, self.sizes = q, k, v, chosen, sizes
        self.batch, self.tokens, self.heads, self.width = q.shape
        self.key_heads, self.slots = chosen.shape[2:]
        self.group = self.heads // self.key_heads
        self.group_padded = power_of_two(self.group)
        share = _BACKWARD_SHARE if backward else _FORWARD_SHARE
        self.segment = segment_of(self.tokens, self.slots, share)
        self.index: Index = make_index(chosen, sizes)

    def forward(self, others: Branches, *, keep: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """The gated sum of all branches, the selection's own result (where kept), its lse [B, T, Q]."""
        q = self.q
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        selected = torch.empty_like(out) if keep else None
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        parts = self._parts()
        parts_lse = torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device)
        tile = _tiles(q.dtype, self.width, self.sizes.block)[0]
        work = self._short_work()
        for number, (start, stop) in enumerate(self._segments()):
            piece = (work.block[number], work.first[number], work.last[number])
            _KERNELS.launch(
                "pair_forward",
                (work.pieces * self.batch * self.key_heads,),
                *strided(q),
                *strided(self.k),
                *strided(self.v),
                parts,
                parts_lse,
                self.index.pairs_ZP,
                *piece,
                start,
                stop,
                self.tokens,
                self.heads,
                self.group,
                self.width,
                self.sizes.scale * LOG2_E,
                work.pieces,
                **self._constants(tile),
            )
            _KERNELS.launch(
                "combine",
                self._adding_grid(start, stop),
                parts,
                parts_lse,
                self.chosen,
                others.compressed,
                others.nearby,
                *others.gates,
                selected,
                out,
                lse,
                start,
                stop,
                self.tokens,
                self.heads,
                self.group,
                self.width,
                SLOTS_PADDED=power_of_two(self.slots),
                KEEP=keep,
                **self._adding_constants(),
            )
        return out, selected, lse

    def add_query_gradient(self, dq: Tensor, grad: Tensor, rows: Rows) -> None:
        """On top of what dq holds."""
        parts = self._parts()
        tile = _tiles(self.q.dtype, self.width, self.sizes.block)[1]
        work = self._short_work()
        for number, (start, stop) in enumerate(self._segments()):
            piece = (work.block[number], work.first[number], work.last[number])
            _KERNELS.launch(
                "pair_query_gradient",
                (work.pieces * self.batch * self.key_heads,),
                *strided(self.q),
                *strided(self.k),
                *strided(self.v),
                *strided(grad),
                parts,
                rows.lse,
                rows.delta,
                rows.gate,
                self.index.pairs_ZP,
                *piece,
                start,
                stop,
                self.tokens,
                self.heads,
                self.group,
                self.width,
                self.sizes.scale * LOG2_E,
                self.sizes.scale,
                work.pieces,
                **self._constants(tile),
            )
            _KERNELS.launch(
                "add_parts",
                self._adding_grid(start, stop),
                parts,
                self.chosen,
                dq,
                start,
                stop,
                self.tokens,
                self.heads,
                self.group,
                self.width,
                **self._adding_constants(),
            )

    def add_key_gradient(self, dk: Tensor, dv: Tensor, grad: Tensor, rows: Rows) -> None:
        """On top of what dk and dv hold; both contiguous."""
        tile = _tiles(self.q.dtype, self.width, self.sizes.block)[2]
        pairs_of_piece = max(1, _ROWS_OF_LONG_PIECE // self.group_padded)
        work = work_of_all(self.index, self.slots, self.tokens, pairs_of_piece)
        beyond = work.pieces - self.index.blocks
        block_rows = self._block_rows()
        z = self.batch * self.key_heads
        more = torch.empty((z, beyond, 2, block_rows, self.width), dtype=torch.float32, device=dk.device)
        _KERNELS.launch(
            "pair_key_gradient",
            (work.pieces * z,),
            *strided(self.q),
            *strided(self.k),
            *strided(self.v),
            *strided(grad),
            dk,
            dv,
            more,
            rows.lse,
            rows.delta,
            rows.gate,
            self.index.pairs_ZP,
            work.block,
            work.first,
            work.last,
            self.tokens,
            self.heads,
            self.group,
            self.index.blocks,
            self.width,
            self.sizes.scale * LOG2_E,
            self.sizes.scale,
            work.pieces,
            beyond,
            **self._constants(tile),
        )
        if beyond == 0:
            return
        _KERNELS.launch(
            "add_more",
            (self.index.blocks * z,),
            more,
            dk,
            dv,
            work.start_of_block,
            self.tokens,
            self.key_heads,
            self.index.blocks,
            self.width,
            beyond,
            BLOCK=self.sizes.block,
            BLOCK_N=block_rows,
            BLOCK_D=power_of_two(self.width, SMALLEST_TILE),
            num_warps=8,
        )

    def _parts(self) -> Tensor:
        shape = (self.batch, min(self.segment, self.tokens), self.slots, self.heads, self.width)
        return torch.empty(shape, dtype=self.q.dtype, device=self.q.device)

    def _short_work(self) -> Work:
        pairs = max(1, _ROWS_OF_PIECE // self.group_padded)
        return work_of_segments(self.index, self.slots, self.segment, pairs)

    def _segments(self) -> list[tuple[int, int]]:
        return [
            (start, min(start + self.segment, self.tokens)) for start in range(0, self.tokens, self.segment)
        ]

    def _block_rows(self) -> int:
        return power_of_two(self.sizes.block, SMALLEST_TILE)

    def _constants(self, tile: Tile) -> dict[str, Any]:
        return {
            "BLOCK": self.sizes.block,
            "SLOTS": self.slots,
            "GROUP": self.group_padded,
            "ROWS": max(tile.rows, self.group_padded),
            "BLOCK_N": self._block_rows(),
            "BLOCK_D": power_of_two(self.width, SMALLEST_TILE),
            "PRECISION": "ieee",
            **tile.run,
        }

    def _adding_grid(self, start: int, stop: int) -> tuple[int]:
        return (cdiv((stop - start) * self.heads, _ROWS_ADDED) * self.batch,)

    def _adding_constants(self) -> dict[str, Any]:
        return {
            "SLOTS": self.slots,
            "ROWS": _ROWS_ADDED,
            "BLOCK_D": power_of_two(self.width, SMALLEST_TILE),
            "num_warps": 4,
        }


def row_products(
    grad: Tensor, compressed: Tensor, selected: Tensor, nearby: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """grad . out of the compressed [B, Q, T], selected [B, T, Q] and nearby [B, Q, T] branch."""
    batch, tokens, heads, width = grad.shape
    delta_cmp, delta_win = (
        torch.empty((batch, heads, tokens), dtype=torch.float32, device=grad.device) for _ in range(2)
    )
    delta_slc = torch.empty((batch, tokens, heads), dtype=torch.float32, device=grad.device)
    _KERNELS.launch(
        "row_products",
        (cdiv(tokens, 32) * batch * heads,),
        *strided(grad),
        compressed,
        selected,
        nearby,
        delta_cmp,
        delta_win,
        delta_slc,
        tokens,
        heads,
        width,
        TOKENS=32,
        BLOCK_D=power_of_two(width, SMALLEST_TILE),
        num_warps=4,
    )
    return delta_cmp, delta_slc, delta_win


def shared_bytes(dtype: torch.dtype, width: int, group: int, sizes: Sizes) -> int:
    """Shared memory that a backward program takes, as the compiler lays it out: a block's keys and values,
    and in each stage rows of queries and of gradients; in float32 also the weights of one stage."""
    backward = _tiles(dtype, width, sizes.block)[1:]
    rows = max(max(tile.rows, power_of_two(group)) * tile.stages for tile in backward)
    keys = power_of_two(sizes.block, SMALLEST_TILE)
    weights = keys * rows * dtype.itemsize if dtype == torch.float32 else 0
    return 2 * (keys + rows) * power_of_two(width, SMALLEST_TILE) * dtype.itemsize + weights


def _tiles(dtype: torch.dtype, width: int, block: int) -> tuple[Tile, Tile, Tile]:
    """Rows (pairs x heads of a group) at a time of forward, dq, and dk with dv; columns: a block's keys."""
    if dtype == torch.float32:
        return (Tile(16, 0, 4, 1),) * 3
    if width <= 128:
        # Four warps have the registers for dk and dv of a block of 64 x 128 numbers.
        few = power_of_two(block) * power_of_two(width) <= 64 * 128
        return Tile(64, 0, 4, 2), Tile(64, 0, 4, 2), Tile(32, 0, 4, 2) if few else Tile(64, 0, 8, 2)
    return Tile(64, 0, 8, 1), Tile(64, 0, 8, 1), Tile(64, 0, 8, 1)
