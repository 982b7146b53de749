"""Starts the kernels that find each token's blocks. One segment of tokens' importances is held at a time."""

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.sparse_attention.problem import Sizes
from oomph.ops.sparse_attention.tensors import (
    LOG2_E,
    SHARED_MEMORY,
    SMALLEST_TILE,
    Tile,
    cdiv,
    power_of_two,
    strided,
)
from oomph.units import MiB

_KERNELS = Kernels("oomph.ops.sparse_attention.selection.triton")
_HELD = 128 * MiB  # importances at a time, at most
_FEWEST_TOKENS = 64
_WIDEST_ROW = 4096  # importances of a token that are kept in registers
_ROW_OF_WARP = 1024  # numbers at a time of a warp, if a row is shorter


def select(q: Tensor, ck: Tensor, lse: Tensor, sizes: Sizes) -> Tensor:
    """The blocks of each token and key/value head, [B, T, H, slots] int32; -1 where there are fewer."""
    batch, tokens, heads, width = q.shape
    n_keys, key_heads = ck.shape[1:3]
    group = heads // key_heads
    blocks, slots = sizes.blocks(tokens), sizes.slots(tokens)
    chosen = torch.empty((batch, tokens, key_heads, slots), dtype=torch.int32, device=q.device)
    segment = segment_tokens(batch * key_heads, tokens, blocks)
    held = torch.empty((batch * key_heads * segment * blocks,), dtype=torch.float32, device=q.device)
    tile = _tile(q.dtype, width, group, sizes)
    group_padded = power_of_two(group)
    tokens_of_tile = max(1, tile.rows // group_padded)
    units_padded = power_of_two(sizes.units_of_block)
    blocks_of_tile = _blocks_of_tile(tile, sizes)
    for start in range(0, tokens, segment):
        stop = min(start + segment, tokens)
        seen = sizes.blocks(stop)
        row_width = min(_WIDEST_ROW, power_of_two(seen, SMALLEST_TILE))
        rows = max(1, _ROW_OF_WARP // row_width)
        _KERNELS.launch(
            "importance",
            (cdiv(stop - start, tokens_of_tile) * batch * key_heads,),
            *strided(q),
            *strided(ck),
            lse,
            held,
            start,
            stop,
            tokens,
            n_keys,
            heads,
            group,
            blocks,
            width,
            sizes.scale * LOG2_E,
            SPAN=sizes.span,
            STRIDE=sizes.stride,
            UNITS_SPAN=sizes.units_of_span,
            UNITS=sizes.units_of_block,
            UNITS_PADDED=units_padded,
            TOKENS=tokens_of_tile,
            GROUP=group_padded,
            BLOCKS=blocks_of_tile,
            BLOCK_D=power_of_two(width, SMALLEST_TILE),
            PRECISION="ieee",
            **tile.run,
        )
        _KERNELS.launch(
            "select",
            (cdiv(stop - start, rows) * batch * key_heads,),
            held,
            chosen,
            start,
            stop,
            tokens,
            key_heads,
            blocks,
            BLOCK=sizes.block,
            SLOTS=slots,
            TOKENS=rows,
            WIDTH=row_width,
            ONE_LOAD=seen <= row_width,
            num_warps=1,
        )
    return chosen


def shared_bytes(dtype: torch.dtype, width: int, group: int, sizes: Sizes) -> int:
    """Shared memory that a program takes."""
    return _bytes_of(_tile(dtype, width, group, sizes), dtype, width, group, sizes)


def _bytes_of(tile: Tile, dtype: torch.dtype, width: int, group: int, sizes: Sizes) -> int:
    """As the compiler lays it out: queries, and in each stage the keys that begin in the tile's blocks and
    those that reach into them."""
    keys = _blocks_of_tile(tile, sizes) * (power_of_two(sizes.units_of_block) + sizes.units_of_span - 1)
    rows = max(tile.rows, power_of_two(group))
    return (tile.stages * keys + rows) * power_of_two(width, SMALLEST_TILE) * dtype.itemsize


def _blocks_of_tile(tile: Tile, sizes: Sizes) -> int:
    return max(SMALLEST_TILE, tile.columns // power_of_two(sizes.units_of_block))


def segment_tokens(rows: int, tokens: int, blocks: int) -> int:
    """Tokens whose importances are held at a time: a number of bytes that does not grow with the length."""
    fitting = _HELD // (4 * rows * blocks) // _FEWEST_TOKENS * _FEWEST_TOKENS
    return min(tokens, max(_FEWEST_TOKENS, fitting))


def _tile(dtype: torch.dtype, width: int, group: int, sizes: Sizes) -> Tile:
    """Rows (tokens x heads of a group) and columns (compressed blocks) of a product."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 1)
    if width > 128:
        return Tile(64, 64, 4, 2)
    # Three stages are the fastest; two leave room for more compressed keys per block.
    fastest = Tile(128, 64, 8, 3)
    if _bytes_of(fastest, dtype, width, group, sizes) <= SHARED_MEMORY:
        return fastest
    return Tile(128, 64, 8, 2)
