"""From "which blocks does a token select" to "which tokens select a block", on the device, without a sync.

Pairs (token, slot) are listed by block, and within a block by segment of tokens: so one list serves passes
over one segment and passes over all. Within a segment the order of a block's pairs is that of arrival, which
differs from run to run: sums over the pairs of a block (dk and dv) may differ in their last bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.sparse_attention.problem import Sizes
from oomph.ops.sparse_attention.tensors import cdiv

_KERNELS = Kernels("oomph.ops.sparse_attention.pairs.triton")
_SIZE = 1024  # pairs of one program
_ALIGNED = 64


@dataclass(frozen=True, eq=False)
class Index:
    """Z = B * H. Block b's pairs of segment s are pairs_ZP[z, starts_ZS[z, b * segments + s] : ... + 1]."""

    pairs_ZP: Tensor
    starts_ZS: Tensor
    blocks: int
    segment: int  # tokens
    segments: int


@dataclass(frozen=True, eq=False)
class Work:
    """Pieces of work [..., Z, W]: a block (-1: none) and a range of its pairs. W is an upper bound."""

    block: Tensor
    first: Tensor
    last: Tensor
    start_of_block: Tensor  # [..., Z, blocks + 1]

    @property
    def pieces(self) -> int:
        return self.block.shape[-1]


def segment_of(tokens: int, slots: int, share: float) -> int:
    """Tokens whose parts (`slots` of them each) take `share` of the memory of all the queries."""
    fair = int(tokens * share) // slots // _ALIGNED * _ALIGNED
    return min(tokens, max(2 * _ALIGNED, fair))


def make_index(chosen: Tensor, sizes: Sizes, segment: int) -> Index:
    """`chosen` [B, T, H, slots]."""
    batch, tokens, heads, slots = chosen.shape
    blocks, segments = sizes.blocks(tokens), cdiv(tokens, segment)
    counts = torch.zeros((batch * heads, blocks * segments), dtype=torch.int32, device=chosen.device)
    rank = torch.empty_like(chosen)
    shape = (tokens, heads, blocks, segments, segment)
    grid = (cdiv(tokens * heads * slots, _SIZE), batch)
    _KERNELS.launch("count_pairs", grid, chosen, counts, rank, *shape, SLOTS=slots, SIZE=_SIZE)
    starts = torch.zeros((batch * heads, blocks * segments + 1), dtype=torch.int32, device=chosen.device)
    torch.cumsum(counts, 1, dtype=torch.int32, out=starts[:, 1:])
    pairs = torch.empty((batch * heads, tokens * slots), dtype=torch.int32, device=chosen.device)
    _KERNELS.launch("list_pairs", grid, chosen, rank, starts, pairs, *shape, SLOTS=slots, SIZE=_SIZE)
    return Index(pairs, starts, blocks, segment, segments)


def work_of_segments(index: Index, slots: int, pairs_of_piece: int) -> Work:
    """[segments, Z, W]: each segment's work."""
    z = index.starts_ZS.shape[0]
    shape = (z, index.blocks, index.segments)
    first = index.starts_ZS[:, :-1].view(shape).permute(2, 0, 1)
    last = index.starts_ZS[:, 1:].reshape(shape).permute(2, 0, 1)
    most = index.blocks + index.segment * slots // pairs_of_piece
    return _work(first, last, pairs_of_piece, most, at_least=0)


def work_of_all(index: Index, slots: int, tokens: int, pairs_of_piece: int) -> Work:
    """[Z, W]: the work of all tokens; every block has a piece, if an empty one."""
    edges = index.starts_ZS[:, :: index.segments]
    most = index.blocks + tokens * slots // pairs_of_piece
    return _work(edges[:, :-1], edges[:, 1:], pairs_of_piece, most, at_least=1)


def _work(first: Tensor, last: Tensor, size: int, most: int, at_least: int) -> Work:
    blocks = first.shape[-1]
    pieces = ((last - first + (size - 1)) // size).clamp(min=at_least)
    start = torch.zeros((*first.shape[:-1], blocks + 1), dtype=torch.int32, device=first.device)
    ends = torch.cumsum(pieces, -1, dtype=torch.int32)
    start[..., 1:] = ends
    number = torch.arange(most, dtype=torch.int32, device=first.device).expand(*first.shape[:-1], most)
    block = torch.searchsorted(ends, number.contiguous(), right=True, out_int32=True)
    at = block.clamp(max=blocks - 1).long()
    piece_first = first.gather(-1, at) + (number - start.gather(-1, at)) * size
    piece_last = torch.minimum(piece_first + size, last.gather(-1, at))
    block = torch.where(block < blocks, block, -1)
    return Work(block, piece_first.contiguous(), piece_last.contiguous(), start)
