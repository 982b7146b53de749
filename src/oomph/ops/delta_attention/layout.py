"""Tokens of a segment laid out chunk by chunk, and back.

Legend: P places of a block, M blocks of a chunk, N chunks of a segment, H heads. [B, T, H, ...] becomes
[P, M, N, H, ...] in the dtype of the receiver. Chunks are ordered by depth: the first ones of all pieces,
then the second ones, and so on. Places after the end of a piece are zeros: there log alpha = 0, beta = 0 and
k = 0 leave the state as it is.
"""

import torch
from torch import Tensor

from oomph.ops.delta_attention.segments import Segment


class Layout:
    """One segment's layout, for tensors [B, T, H, ...] of any last dimension (or none)."""

    def __init__(self, segment: Segment, places: int, packed: bool, device: torch.device) -> None:
        self.segment, self.places = segment, places
        self.blocks = segment.chunk // places
        self._rows = _PackedRows(segment, places, device) if packed else None

    def take(self, x: Tensor, into: Tensor) -> None:
        """The segment's tokens of x [B, T, H, ...] into a tensor [P, M, N, H, ...], or such a view."""
        if self._rows is not None:
            into.copy_(x[0].index_select(0, self._rows.of_places).view(into.shape))
            if self._rows.empty is not None:
                into[self._rows.empty] = 0
            return
        if self._tokens % self.segment.chunk:
            into.zero_()
        for inside, outside in self._pairs(into, x):
            inside.copy_(outside)

    def put(self, out: Tensor, x: Tensor) -> None:
        """The reverse of take: x [P, M, N, H, ...] into the segment's tokens of out [B, T, H, ...]."""
        if self._rows is not None:
            filled = x.flatten(0, 2)[self._rows.filled_places]
            out[0].index_copy_(0, self._rows.filled_rows, filled.to(out.dtype))
            return
        for inside, outside in self._pairs(x, out):
            outside.copy_(inside)

    @property
    def _tokens(self) -> int:
        return self.segment.pieces[0].tokens

    def _pairs(self, chunks: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same tokens in both layouts: of whole chunks, of whole blocks after them, and the rest."""
        places, blocks = self.places, self.blocks
        cut = chunks.unflatten(2, (-1, x.shape[0]))  # [P, M, n, B, H, ...]
        start = self.segment.pieces[0].start
        x = x[:, start : start + self._tokens].transpose(0, 1)
        full, rest = divmod(self._tokens, places * blocks)
        whole, single = divmod(rest, places)
        pairs = []
        if full:
            tokens = x[: full * blocks * places].unflatten(0, (full, blocks, places))
            pairs.append((cut[:, :, :full], tokens.transpose(0, 2)))
        if whole:
            tokens = x[full * blocks * places :][: whole * places].unflatten(0, (whole, places))
            pairs.append((cut[:, :whole, full], tokens.transpose(0, 1)))
        if single:
            pairs.append((cut[:single, whole, full], x[self._tokens - single :]))
        return pairs


class _PackedRows:
    """Where the tokens of packed pieces are: `of_places` the row of every place [P * M * N]."""

    def __init__(self, segment: Segment, places: int, device: torch.device) -> None:
        starts, counts = [], []
        for depth, width in enumerate(segment.widths):
            for piece in segment.pieces[:width]:
                starts.append(piece.row + depth * segment.chunk)
                counts.append(min(segment.chunk, piece.tokens - depth * segment.chunk))
        tokens = torch.arange(segment.chunk).view(-1, places).t().unsqueeze(-1)  # [P, M, 1]
        filled = tokens < torch.tensor(counts)
        rows = torch.where(filled, torch.tensor(starts) + tokens, 0)
        self.of_places = rows.flatten().to(device)
        self.empty = None if bool(filled.all()) else (~filled).to(device)
        self.filled_places = filled.flatten().nonzero().flatten().to(device)
        self.filled_rows = rows[filled].to(device)
