"""How a call is cut up for the kernels: chunks, segments of chunks, tiles; and where packed sequences begin.

A chunk is what one program of the chunk kernels takes, a segment what one round of launches takes. Scratch
memory is that of one segment.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 32  # tokens; triton_launch says why not 64
# Below so many chunk programs per launch a GPU of 132 multiprocessors runs out of work.
PROGRAMS = 1024
# Segments of the default: scratch memory is then about a third of what the gradients take.
SEGMENTS = 8


@dataclass(frozen=True)
class Packing:
    """Sequences side by side in one row of tokens, in tensors on the device: nothing here waits for it."""

    start: Tensor  # the first token of every chunk
    rows: Tensor  # how many tokens it has; 0 past the last chunk
    sequence_chunk: Tensor  # the first chunk of every sequence, and the end of the last


@dataclass(frozen=True)
class Span:
    """Neighbouring chunks."""

    first: int
    chunks: int


@dataclass(frozen=True)
class Plan:
    batch: int
    tokens: int
    heads: int
    dk: int
    dv: int
    chunk: int
    chunks: int  # per row of the batch; with packed sequences, an upper bound
    segment: int  # chunks of a segment
    sequences: int
    packing: Packing | None

    @property
    def segments(self) -> int:
        return -(-self.chunks // self.segment)

    def span(self, segment: int) -> Span:
        first = segment * self.segment
        return Span(first, min(self.segment, self.chunks - first))

    @property
    def scratch_rows(self) -> int:
        return min(self.segment * self.chunk, self.tokens)

    @property
    def levels(self) -> int:
        return self.chunk.bit_length() - 1


def make_plan(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, segment_tokens: int | None) -> Plan:
    batch, tokens, heads, dk = q.shape
    dv = v.shape[-1]
    chunk = CHUNK
    if cu_seqlens is None:
        packing, sequences, chunks = None, batch, -(-tokens // chunk)
    else:
        sequences = cu_seqlens.numel() - 1
        # Each sequence may leave a last chunk with as little as one token.
        chunks = (tokens + sequences * (chunk - 1)) // chunk
        packing = _pack(cu_seqlens, chunk, chunks)
    if segment_tokens is None:
        segment = max(-(-chunks // SEGMENTS), -(-PROGRAMS // (batch * heads)))
    else:
        segment = max(1, segment_tokens // chunk)
    return Plan(batch, tokens, heads, dk, dv, chunk, chunks, min(segment, chunks), sequences, packing)


def _pack(cu_seqlens: Tensor, chunk: int, chunks: int) -> Packing:
    counts = (cu_seqlens.diff() + (chunk - 1)) // chunk
    ends = counts.cumsum(0)
    index = torch.arange(chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(ends, index, right=True).clamp_(max=counts.numel() - 1)
    start = cu_seqlens[sequence] + (index - (ends - counts)[sequence]) * chunk
    rows = (cu_seqlens[sequence + 1] - start).clamp_(0, chunk)
    sequence_chunk = torch.cat([ends.new_zeros(1), ends])
    return Packing(start.int(), rows.int(), sequence_chunk.int())


def power_of_two(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
