"""From "which blocks does a token select" to "which tokens select a block", on the device, without a sync.

Pairs (token, slot) are listed by block, and within a block in the order of their tokens: so one list serves
passes over a segment of the tokens and passes over all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.launch import Kernels
from oomph.ops.sparse_attention.problem import Sizes
from oomph.ops.sparse_attention.tensors import cdiv, power_of_two

_KERNELS = Kernels("oomph.ops.sparse_attention.pairs.triton")
_SIZE = 1024  # pairs of one program that lists them
_RANKED = 64  # pairs that are compared with each other at a time
_STRETCHES = 128  # at most
_ALIGNED = 64  # tokens of the shortest stretch


@dataclass(frozen=True, eq=False)
class Index:
    """Z = B * H. Block b's pairs of stretch s are pairs_ZP[z, starts_ZS[z, b * stretches + s] : ... + 1]."""

    pairs_ZP: Tensor
    starts_ZS: Tensor
    blocks: int
    stretch: int  # tokens
    stretches: int


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


def stretch_of(tokens: int) -> int:
    """Tokens that are listed one after the other. Many stretches run side by side, each with its counters."""
    return max(_ALIGNED, cdiv(cdiv(tokens, _STRETCHES), _ALIGNED) * _ALIGNED)


def segment_of(tokens: int, slots: int, share: float) -> int:
    """Tokens, in whole stretches, whose parts (`slots` each) take `share` of the memory of all queries."""
    stretch = stretch_of(tokens)
    return max(1, int(tokens * share) // slots // stretch) * stretch


def make_index(chosen: Tensor, sizes: Sizes) -> Index:
    """`chosen` [B, T, H, slots]."""
    batch, tokens, heads, slots = chosen.shape
    stretch = stretch_of(tokens)
    blocks, stretches = sizes.blocks(tokens), cdiv(tokens, stretch)
    counts = torch.zeros((batch * heads, blocks * stretches), dtype=torch.int32, device=chosen.device)
    rank = torch.empty_like(chosen)
    shape = (tokens, heads, blocks, stretches, stretch)
    padded = power_of_two(slots)
    _KERNELS.launch(
        "rank_pairs",
        (batch * heads * stretches,),
        chosen,
        counts,
        rank,
        *shape,
        SLOTS=slots,
        SLOTS_PADDED=padded,
        TOKENS=max(1, _RANKED // padded),
        num_warps=4,
    )
    starts = torch.zeros((batch * heads, blocks * stretches + 1), dtype=torch.int32, device=chosen.device)
    torch.cumsum(counts, 1, dtype=torch.int32, out=starts[:, 1:])
    pairs = torch.empty((batch * heads, tokens * slots), dtype=torch.int32, device=chosen.device)
    grid = (cdiv(tokens * heads * slots, _SIZE) * batch,)
    _KERNELS.launch("list_pairs", grid, chosen, rank, starts, pairs, *shape, SLOTS=slots, SIZE=_SIZE)
    return Index(pairs, starts, blocks, stretch, stretches)


def work_of_segments(index: Index, slots: int, segment: int, pairs_of_piece: int) -> Work:
    """[segments, Z, W]: each segment's work."""
    by_block = index.starts_ZS[:, :-1].view(-1, index.blocks, index.stretches)
    ends = index.starts_ZS[:, index.stretches :: index.stretches]
    edges = torch.cat([by_block[..., :: segment // index.stretch], ends[..., None]], -1).permute(2, 0, 1)
    most = index.blocks + segment * slots // pairs_of_piece
    return _work(edges[:-1], edges[1:], pairs_of_piece, most, at_least=0)


def work_of_all(index: Index, slots: int, tokens: int, pairs_of_piece: int) -> Work:
    """[Z, W]: the work of all tokens; every block has a piece, if an empty one."""
    edges = index.starts_ZS[:, :: index.stretches]
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
