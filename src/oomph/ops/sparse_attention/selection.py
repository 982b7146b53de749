"""The selection branch through Triton kernels: which blocks each token selects, and attention to them.

B batch, T tokens, H key/value heads, Q query heads, Z = B * H.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.ops.common import Kernels, TileConfig, cdiv, power_of_two, strided
from oomph.ops.sparse_attention.arguments import NSAConfig
from oomph.units import KiB, MiB

_KERNELS = Kernels("oomph.ops.sparse_attention.kernels")
LOG2_E = math.log2(math.e)
MIN_TILE = 16  # smallest side of a product in Triton


class RowValues(NamedTuple):
    """Per token and query head: [B, T, Q] for the selection, [B, Q, T] in float32 for the other branches."""

    lse: Tensor
    delta: Tensor
    gate: Tensor


# Which blocks are selected ---------------------------------------------------------------------------

_IMPORTANCE_BYTES = 128 * MiB  # held at a time, at most
_MIN_SEGMENT = 64  # tokens
_MAX_ROW = 4096  # importances of a token that are held in registers
_ROW_PER_WARP = 1024  # importances that a warp reads at a time, if a row is shorter
SHARED_MEMORY = (227 - 10) * KiB  # of an H100 or H200, less what a kernel uses for smaller things


def select_blocks(q: Tensor, ck: Tensor, lse: Tensor, config: NSAConfig) -> Tensor:
    """The blocks of each token and key/value head, [B, T, H, slots] int32; -1 where there are fewer.

    Holds the importances of one segment of tokens at a time.
    """
    batch, tokens, heads, head_dim = q.shape
    n_keys, key_heads = ck.shape[1:3]
    group = heads // key_heads
    blocks, slots = config.blocks(tokens), config.slots(tokens)
    chosen = torch.empty((batch, tokens, key_heads, slots), dtype=torch.int32, device=q.device)
    segment = importance_segment(batch * key_heads, tokens, blocks)
    importance = torch.empty((batch * key_heads * segment * blocks,), dtype=torch.float32, device=q.device)
    tile = _importance_tile(q.dtype, head_dim, group, config)
    group_padded = power_of_two(group)
    tokens_per_tile = max(1, tile.rows // group_padded)
    for start in range(0, tokens, segment):
        stop = min(start + segment, tokens)
        visible_blocks = config.blocks(stop)
        row_width = min(_MAX_ROW, power_of_two(visible_blocks, MIN_TILE))
        rows = max(1, _ROW_PER_WARP // row_width)
        _KERNELS.launch(
            "block_importance",
            (cdiv(stop - start, tokens_per_tile) * batch * key_heads,),
            *(*strided(q), *strided(ck), lse, importance, start, stop),
            *(tokens, n_keys, heads, group, blocks, head_dim, config.scale * LOG2_E),
            SPAN=config.compress_block,
            STRIDE=config.compress_stride,
            SPAN_STRIDES=config.strides_per_compressed,
            BLOCK_STRIDES=config.strides_per_block,
            PADDED_STRIDES=power_of_two(config.strides_per_block),
            TOKENS=tokens_per_tile,
            GROUP=group_padded,
            BLOCKS=_blocks_per_tile(tile, config),
            BLOCK_D=power_of_two(head_dim, MIN_TILE),
            PRECISION="ieee",
            **tile.launch_options,
        )
        _KERNELS.launch(
            "select_blocks",
            (cdiv(stop - start, rows) * batch * key_heads,),
            *(importance, chosen, start, stop, tokens, key_heads, blocks),
            BLOCK=config.block_size,
            SLOTS=slots,
            TOKENS=rows,
            WIDTH=row_width,
            ONE_LOAD=visible_blocks <= row_width,
            num_warps=1,
        )
    return chosen


def importance_segment(rows: int, tokens: int, blocks: int) -> int:
    """Tokens whose importances are held at a time: a number of bytes that does not grow with the length."""
    fitting = _IMPORTANCE_BYTES // (4 * rows * blocks) // _MIN_SEGMENT * _MIN_SEGMENT
    return min(tokens, max(_MIN_SEGMENT, fitting))


def importance_shared_bytes(dtype: torch.dtype, head_dim: int, group: int, config: NSAConfig) -> int:
    """Shared memory of a program of block_importance."""
    return _importance_tile_bytes(
        _importance_tile(dtype, head_dim, group, config), dtype, head_dim, group, config
    )


def _importance_tile_bytes(
    tile: TileConfig, dtype: torch.dtype, head_dim: int, group: int, config: NSAConfig
) -> int:
    """As the compiler lays it out: queries, and in each stage the keys that begin in the tile's blocks and
    those that reach into them."""
    keys_per_block = power_of_two(config.strides_per_block) + config.strides_per_compressed - 1
    keys = _blocks_per_tile(tile, config) * keys_per_block
    rows = max(tile.rows, power_of_two(group))
    return (tile.stages * keys + rows) * power_of_two(head_dim, MIN_TILE) * dtype.itemsize


def _blocks_per_tile(tile: TileConfig, config: NSAConfig) -> int:
    return max(MIN_TILE, tile.columns // power_of_two(config.strides_per_block))


def _importance_tile(dtype: torch.dtype, head_dim: int, group: int, config: NSAConfig) -> TileConfig:
    """Rows (tokens x heads of a group) and columns (compressed blocks) of a product."""
    if dtype == torch.float32:
        return TileConfig(32, 32, 4, 1)
    if head_dim > 128:
        return TileConfig(64, 64, 4, 2)
    # Three stages are the fastest; two leave room for more compressed keys per block.
    fastest = TileConfig(128, 64, 8, 3)
    if _importance_tile_bytes(fastest, dtype, head_dim, group, config) <= SHARED_MEMORY:
        return fastest
    return TileConfig(128, 64, 8, 2)


# Which tokens selected a block -----------------------------------------------------------------------

_PAIRS_PER_PROGRAM = 1024  # of list_pairs
_PAIRS_COMPARED = 64  # at a time, in rank_pairs
_MAX_INDEX_TILES = 128
_MIN_INDEX_TILE = 64  # tokens


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """The (token, slot) pairs that selected each block, computed on the device without a synchronisation.

    Pairs are listed by block, and within a block in the order of their tokens, so one list serves passes over
    a segment of the tokens and passes over all. Block b's pairs from tile s of the tokens are
    pairs_ZP[z, starts_ZS[z, b * tiles + s] : starts_ZS[z, b * tiles + s + 1]].
    """

    pairs_ZP: Tensor
    starts_ZS: Tensor
    blocks: int
    tile_size: int  # tokens that one program lists
    tiles: int

    @staticmethod
    def create(chosen: Tensor, config: NSAConfig) -> "BlockIndex":
        """From `chosen` [B, T, H, slots]."""
        batch, tokens, heads, slots = chosen.shape
        tile_size = _index_tile_size(tokens)
        blocks, tiles = config.blocks(tokens), cdiv(tokens, tile_size)
        counts = torch.zeros((batch * heads, blocks * tiles), dtype=torch.int32, device=chosen.device)
        rank = torch.empty_like(chosen)
        sizes = (tokens, heads, blocks, tiles, tile_size)
        slots_padded = power_of_two(slots)
        _KERNELS.launch(
            "rank_pairs",
            (batch * heads * tiles,),
            *(chosen, counts, rank, *sizes),
            SLOTS=slots,
            SLOTS_PADDED=slots_padded,
            TOKENS=max(1, _PAIRS_COMPARED // slots_padded),
            num_warps=4,
        )
        starts = torch.zeros((batch * heads, blocks * tiles + 1), dtype=torch.int32, device=chosen.device)
        torch.cumsum(counts, 1, dtype=torch.int32, out=starts[:, 1:])
        pairs = torch.empty((batch * heads, tokens * slots), dtype=torch.int32, device=chosen.device)
        _KERNELS.launch(
            "list_pairs",
            (cdiv(tokens * heads * slots, _PAIRS_PER_PROGRAM) * batch,),
            *(chosen, rank, starts, pairs, *sizes),
            SLOTS=slots,
            SIZE=_PAIRS_PER_PROGRAM,
        )
        return BlockIndex(pairs, starts, blocks, tile_size, tiles)

    def work_by_segment(self, slots: int, segment: int, pairs_per_item: int) -> "WorkItems":
        """[segments, Z, W]: the work of each segment of tokens."""
        by_block = self.starts_ZS[:, :-1].view(-1, self.blocks, self.tiles)
        ends = self.starts_ZS[:, self.tiles :: self.tiles]
        edges = torch.cat([by_block[..., :: segment // self.tile_size], ends[..., None]], -1).permute(2, 0, 1)
        most = self.blocks + segment * slots // pairs_per_item
        return WorkItems.create(edges[:-1], edges[1:], pairs_per_item, most, min_items=0)

    def work(self, slots: int, tokens: int, pairs_per_item: int) -> "WorkItems":
        """[Z, W]: the work of all tokens; every block has at least one, possibly empty, item."""
        edges = self.starts_ZS[:, :: self.tiles]
        most = self.blocks + tokens * slots // pairs_per_item
        return WorkItems.create(edges[:, :-1], edges[:, 1:], pairs_per_item, most, min_items=1)


def _index_tile_size(tokens: int) -> int:
    """Tokens that one program lists sequentially; tiles run in parallel, each with its own counters."""
    return max(_MIN_INDEX_TILE, cdiv(cdiv(tokens, _MAX_INDEX_TILES), _MIN_INDEX_TILE) * _MIN_INDEX_TILE)


@dataclass(frozen=True, eq=False)
class WorkItems:
    """Work items [..., Z, W]: a block (-1: none) and a range of its pairs. W is an upper bound."""

    block: Tensor
    first: Tensor
    last: Tensor
    start_of_block: Tensor  # [..., Z, blocks + 1]: the first item of each block

    @property
    def count(self) -> int:
        return self.block.shape[-1]

    @staticmethod
    def create(first: Tensor, last: Tensor, pairs_per_item: int, most: int, min_items: int) -> "WorkItems":
        blocks = first.shape[-1]
        items = ((last - first + (pairs_per_item - 1)) // pairs_per_item).clamp(min=min_items)
        start = torch.zeros((*first.shape[:-1], blocks + 1), dtype=torch.int32, device=first.device)
        ends = torch.cumsum(items, -1, dtype=torch.int32)
        start[..., 1:] = ends
        number = torch.arange(most, dtype=torch.int32, device=first.device).expand(*first.shape[:-1], most)
        block = torch.searchsorted(ends, number.contiguous(), right=True, out_int32=True)
        at = block.clamp(max=blocks - 1).long()
        item_first = first.gather(-1, at) + (number - start.gather(-1, at)) * pairs_per_item
        item_last = torch.minimum(item_first + pairs_per_item, last.gather(-1, at))
        block = torch.where(block < blocks, block, -1)
        return WorkItems(block, item_first.contiguous(), item_last.contiguous(), start)


# Attention to the selected blocks --------------------------------------------------------------------

# Size of `parts`, relative to the queries; a segment of tokens at a time. Forward has more memory to spare.
_FORWARD_PARTS, _BACKWARD_PARTS = 1.0, 0.5
_ROWS_PER_ITEM = 512  # of forward and dq
_ROWS_PER_LONG_ITEM = 32768  # of dk and dv: work beyond it goes to `partial`, an eighth of the queries' size
_ROWS_PER_SUM = 16  # of one program that sums parts


class SelectedAttention:
    """The launches of one call. Segments of tokens run one after the other where they leave parts to sum."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, config: NSAConfig, *, backward: bool
    ) -> None:
        self.q, self.k, self.v, self.chosen, self.config = q, k, v, chosen, config
        self.batch, self.tokens, self.heads, self.head_dim = q.shape
        self.key_heads, self.slots = chosen.shape[2:]
        self.group = self.heads // self.key_heads
        self.group_padded = power_of_two(self.group)
        share = _BACKWARD_PARTS if backward else _FORWARD_PARTS
        tile_size = _index_tile_size(self.tokens)
        self.segment = max(1, int(self.tokens * share) // self.slots // tile_size) * tile_size
        self.index = BlockIndex.create(chosen, config)
        self.block_rows = power_of_two(config.block_size, MIN_TILE)
        self.inputs = (*strided(q), *strided(k), *strided(v))

    def forward(
        self, compressed: Tensor, windowed: Tensor, gates: Sequence[Tensor], *, keep: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The gated sum of all branches, the selected branch's result (if `keep`), its lse [B, T, Q]."""
        q = self.q
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        selected = torch.empty_like(out) if keep else None
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        parts = self._empty_parts()
        parts_lse = torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device)
        tile = _selected_tiles(q.dtype, self.head_dim, self.config.block_size)[0]
        for sizes, items in self._segments():
            _KERNELS.launch(
                "selected_forward",
                (items[0].shape[-1] * self.batch * self.key_heads,),
                *(*self.inputs, parts, parts_lse, self.index.pairs_ZP, *items, *sizes),
                *(self.config.scale * LOG2_E, items[0].shape[-1]),
                **self._constants(tile),
            )
            _KERNELS.launch(
                "combine_branches",
                self._sum_grid(sizes),
                *(parts, parts_lse, self.chosen, compressed, windowed, *gates, selected, out, lse, *sizes),
                SLOTS_PADDED=power_of_two(self.slots),
                KEEP=keep,
                **self._sum_constants(),
            )
        return out, selected, lse

    def add_dq(self, dq: Tensor, grad: Tensor, rows: RowValues) -> None:
        """Add to dq."""
        parts = self._empty_parts()
        tile = _selected_tiles(self.q.dtype, self.head_dim, self.config.block_size)[1]
        scale = self.config.scale
        for sizes, items in self._segments():
            _KERNELS.launch(
                "selected_dq",
                (items[0].shape[-1] * self.batch * self.key_heads,),
                *(*self.inputs, *strided(grad), parts, *rows),
                *(self.index.pairs_ZP, *items, *sizes, scale * LOG2_E, scale, items[0].shape[-1]),
                **self._constants(tile),
            )
            _KERNELS.launch(
                "add_selected_dq",
                self._sum_grid(sizes),
                *(parts, self.chosen, dq, *sizes),
                **self._sum_constants(),
            )

    def add_dkdv(self, dk: Tensor, dv: Tensor, grad: Tensor, rows: RowValues) -> None:
        """Add to dk and dv, which are contiguous."""
        tile = _selected_tiles(self.q.dtype, self.head_dim, self.config.block_size)[2]
        pairs_per_item = max(1, _ROWS_PER_LONG_ITEM // self.group_padded)
        work = self.index.work(self.slots, self.tokens, pairs_per_item)
        beyond = work.count - self.index.blocks  # items that are not the first of their block
        z, scale = self.batch * self.key_heads, self.config.scale
        shape = (z, beyond, 2, self.block_rows, self.head_dim)
        partial = torch.empty(shape, dtype=torch.float32, device=dk.device)
        _KERNELS.launch(
            "selected_dkdv",
            (work.count * z,),
            *(*self.inputs, *strided(grad), dk, dv, partial, *rows),
            *(self.index.pairs_ZP, work.block, work.first, work.last),
            *(self.tokens, self.heads, self.group, self.index.blocks, self.head_dim),
            *(scale * LOG2_E, scale, work.count, beyond),
            **self._constants(tile),
        )
        if beyond == 0:
            return
        _KERNELS.launch(
            "add_partial_dkdv",
            (self.index.blocks * z,),
            *(partial, dk, dv, work.start_of_block),
            *(self.tokens, self.key_heads, self.index.blocks, self.head_dim, beyond),
            BLOCK=self.config.block_size,
            BLOCK_N=self.block_rows,
            BLOCK_D=power_of_two(self.head_dim, MIN_TILE),
            num_warps=8,
        )

    def _empty_parts(self) -> Tensor:
        shape = (self.batch, min(self.segment, self.tokens), self.slots, self.heads, self.head_dim)
        return torch.empty(shape, dtype=self.q.dtype, device=self.q.device)

    def _segments(self) -> Iterator[tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]]:
        """The kernels' sizes and the work items of each segment."""
        pairs_per_item = max(1, _ROWS_PER_ITEM // self.group_padded)
        work = self.index.work_by_segment(self.slots, self.segment, pairs_per_item)
        for number, start in enumerate(range(0, self.tokens, self.segment)):
            stop = min(start + self.segment, self.tokens)
            sizes = (start, stop, self.tokens, self.heads, self.group, self.head_dim)
            yield sizes, (work.block[number], work.first[number], work.last[number])

    def _constants(self, tile: TileConfig) -> dict[str, Any]:
        return {
            "BLOCK": self.config.block_size,
            "SLOTS": self.slots,
            "GROUP": self.group_padded,
            "ROWS": max(tile.rows, self.group_padded),
            "BLOCK_N": self.block_rows,
            "BLOCK_D": power_of_two(self.head_dim, MIN_TILE),
            "PRECISION": "ieee",
            **tile.launch_options,
        }

    def _sum_grid(self, sizes: tuple[int, ...]) -> tuple[int]:
        return (cdiv((sizes[1] - sizes[0]) * self.heads, _ROWS_PER_SUM) * self.batch,)

    def _sum_constants(self) -> dict[str, Any]:
        return {
            "SLOTS": self.slots,
            "ROWS": _ROWS_PER_SUM,
            "BLOCK_D": power_of_two(self.head_dim, MIN_TILE),
            "num_warps": 4,
        }


def branch_deltas(
    grad: Tensor, compressed: Tensor, selected: Tensor, windowed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """grad . out of the compressed [B, Q, T], selected [B, T, Q] and windowed [B, Q, T] branch."""
    batch, tokens, heads, head_dim = grad.shape
    delta_cmp, delta_win = (
        torch.empty((batch, heads, tokens), dtype=torch.float32, device=grad.device) for _ in range(2)
    )
    delta_slc = torch.empty((batch, tokens, heads), dtype=torch.float32, device=grad.device)
    _KERNELS.launch(
        "branch_deltas",
        (cdiv(tokens, 32) * batch * heads,),
        *(*strided(grad), compressed, selected, windowed, delta_cmp, delta_win, delta_slc),
        *(tokens, heads, head_dim),
        TOKENS=32,
        BLOCK_D=power_of_two(head_dim, MIN_TILE),
        num_warps=4,
    )
    return delta_cmp, delta_slc, delta_win


def selected_shared_bytes(dtype: torch.dtype, head_dim: int, group: int, config: NSAConfig) -> int:
    """Shared memory of a backward program, as the compiler lays it out: a block's keys and values, and in
    each stage rows of queries and of gradients; in float32 also the weights of one stage."""
    backward = _selected_tiles(dtype, head_dim, config.block_size)[1:]
    rows = max(max(tile.rows, power_of_two(group)) * tile.stages for tile in backward)
    keys = power_of_two(config.block_size, MIN_TILE)
    weights = keys * rows * dtype.itemsize if dtype == torch.float32 else 0
    return 2 * (keys + rows) * power_of_two(head_dim, MIN_TILE) * dtype.itemsize + weights


def _selected_tiles(
    dtype: torch.dtype, head_dim: int, block_size: int
) -> tuple[TileConfig, TileConfig, TileConfig]:
    """Rows (pairs x heads of a group) of forward, dq, and dk with dv; the columns are a block's keys."""
    if dtype == torch.float32:
        return (TileConfig(16, 0, 4, 1),) * 3
    if head_dim <= 128:
        # Four warps have the registers for dk and dv of a block of 64 x 128 numbers.
        fits = power_of_two(block_size) * power_of_two(head_dim) <= 64 * 128
        dkdv = TileConfig(32, 0, 4, 2) if fits else TileConfig(64, 0, 8, 2)
        return TileConfig(64, 0, 4, 2), TileConfig(64, 0, 4, 2), dkdv
    return (TileConfig(64, 0, 8, 1),) * 3
