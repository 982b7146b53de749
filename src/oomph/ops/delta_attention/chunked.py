"""One segment of Kimi Delta Attention in the chunkwise (WY) form, in plain torch: forward and backward.

Legend: C tokens of a chunk, P positions of a sub-chunk, M sub-chunks of a chunk, N chunks of a segment,
H heads, X = N * H, K key size, V value size, W = sequences * H. q, k and alpha are [P, M, X, K] with
C = M * P (see intra_chunk.py); all else has a chunk's tokens in rows, [X, C, ...].

Per chunk and head, with S the state before it, G_i = alpha_0 ... alpha_i, and Akk, Aqk, kg the products of
intra_chunk.py:
    error   Z = (I + Akk beta)^-1 (v - (k G) S)     of what the state returns for the keys
    output  o = scale ((q G) S + Aqk (beta Z))
    state   S' = G_{C-1} S + kg^T (beta Z)
Everything that does not depend on S is computed first for all chunks, in a few large products; only the state
recurrence goes from chunk to chunk.

On a CPU, a batched product whose second factor is a transposed view is many times slower than one with a
transposed copy (the first factor may be a view): hence the names that end in their layout, and the copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.delta_attention.intra_chunk import (
    QueryKeyGradients,
    Workspace,
    by_position,
    intra_chunk_backward,
    intra_chunk_forward,
    suffix_sums_,
)
from oomph.ops.delta_attention.segments import MemoryCosts, Segment
from oomph.units import KiB, MiB

CHUNK = 32
SUB_CHUNK = 8
# Of a segment, by default. Longer segments take fewer operations, each on more data.
_DEFAULT_SEGMENT_BYTES = 256 * MiB
# Allocators round the sizes of a dozen tensors up.
_ROUNDING = 16 * KiB


def chunked_memory_costs(q: Tensor, v: Tensor, dtype: torch.dtype) -> MemoryCosts:
    """An upper bound, by up to a fifth, counted in predictions of backward."""
    heads, keys, values = q.shape[2:] + v.shape[3:]
    rows = q.shape[0] * heads * dtype.itemsize
    of_products = 23 * keys + 2 * values + 4 * CHUNK
    of_states = 12 * keys + 6 * values + 2 * keys * values // CHUNK + 7 * CHUNK
    state = rows * keys * values
    return MemoryCosts(rows * max(of_products, of_states), 3 * state + _ROUNDING, state)


def default_segment_tokens(costs: MemoryCosts) -> int:
    return max(4 * CHUNK, _DEFAULT_SEGMENT_BYTES // max(1, costs.per_token))


# Layout ----------------------------------------------------------------------------------------------


class ChunkLayout:
    """Copies tokens of a segment between [B, T, H, ...] and [P, M, N, H, ...], in the receiver's dtype.

    Chunks are ordered by their index in the sequence: the first chunks of all ranges, then the second ones,
    and so on. Padding after the end of a range is zeros: log alpha = 0, beta = 0 and k = 0 leave the state
    unchanged.
    """

    def __init__(self, segment: Segment, packed: bool, device: torch.device) -> None:
        self.segment = segment
        self._packed = _PackedIndex(segment, device) if packed else None

    def gather(self, x: Tensor, into: Tensor) -> None:
        """The segment's tokens of x [B, T, H, ...] into a tensor or view [P, M, N, H, ...]."""
        if self._packed is not None:
            into.copy_(x[0].index_select(0, self._packed.rows).view(into.shape))
            if self._packed.padding is not None:
                into[self._packed.padding] = 0
            return
        if self._tokens % self.segment.chunk:
            into.zero_()
        for inside, outside in self._pairs(into, x):
            inside.copy_(outside)

    def scatter(self, x: Tensor, into: Tensor) -> None:
        """The reverse: x [P, M, N, H, ...] into the segment's tokens of a tensor [B, T, H, ...]."""
        if self._packed is not None:
            filled = x.flatten(0, 2)[self._packed.filled]
            into[0].index_copy_(0, self._packed.filled_rows, filled.to(into.dtype))
            return
        for inside, outside in self._pairs(x, into):
            outside.copy_(inside)

    @property
    def _tokens(self) -> int:
        return self.segment.ranges[0].tokens

    def _pairs(self, chunks: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of the same tokens in both layouts: whole chunks, whole sub-chunks after them, the rest."""
        positions, count = SUB_CHUNK, self.segment.chunk // SUB_CHUNK
        chunks = chunks.unflatten(2, (-1, x.shape[0]))  # [P, M, n, B, H, ...]
        start = self.segment.ranges[0].start
        x = x[:, start : start + self._tokens].transpose(0, 1)
        full, rest = divmod(self._tokens, positions * count)
        whole, single = divmod(rest, positions)
        pairs = []
        if full:
            tokens = x[: full * count * positions].unflatten(0, (full, count, positions))
            pairs.append((chunks[:, :, :full], tokens.transpose(0, 2)))
        if whole:
            tokens = x[full * count * positions :][: whole * positions].unflatten(0, (whole, positions))
            pairs.append((chunks[:, :whole, full], tokens.transpose(0, 1)))
        if single:
            pairs.append((chunks[:single, whole, full], x[self._tokens - single :]))
        return pairs


class _PackedIndex:
    """Rows of the packed tokens: `rows` [P * M * N] of every position, and which positions are padding."""

    def __init__(self, segment: Segment, device: torch.device) -> None:
        starts, counts = [], []
        for index, width in enumerate(segment.widths):
            for each in segment.ranges[:width]:
                starts.append(each.row + index * segment.chunk)
                counts.append(min(segment.chunk, each.tokens - index * segment.chunk))
        tokens = torch.arange(segment.chunk).view(-1, SUB_CHUNK).t().unsqueeze(-1)  # [P, M, 1]
        filled = tokens < torch.tensor(counts)
        rows = torch.where(filled, torch.tensor(starts) + tokens, 0)
        self.rows = rows.flatten().to(device)
        self.padding = None if bool(filled.all()) else (~filled).to(device)
        self.filled = filled.flatten().nonzero().flatten().to(device)
        self.filled_rows = rows[filled].to(device)


# Forward and backward --------------------------------------------------------------------------------

# What forward may save of a segment for backward: Akk, Aqk, the inverse [X, C, C], and `solved`.
SavedProducts = tuple[Tensor, Tensor, Tensor, Tensor]


def saved_numbers_per_token(keys: int, values: int) -> int:
    """Of SavedProducts, per head."""
    return 3 * CHUNK + keys + values


@dataclass(frozen=True)
class SegmentGradients:
    """Of v [X, C, V] and beta [X, C, 1]; of q, k and log alpha where wanted."""

    v: Tensor
    beta: Tensor
    rest: QueryKeyGradients | None


@dataclass(frozen=True)
class _ProductGradients:
    """A [X, 2 C, C]: of Akk, then Aqk, arbitrary above the diagonals; kg [X, C, K]; starts [X, 2 C, K]: of
    k G, then q G; total [X, K]: of the log of the chunk's whole decay."""

    A: Tensor
    kg: Tensor
    starts: Tensor
    total: Tensor


class SegmentChunks:
    """A segment's inputs in chunks, and what follows from them without a state.

    `for_backward`: recomputes it, except what was saved, with room for what backward needs beside it.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        inputs: tuple[Tensor, ...],
        scale: float,
        workspace: Workspace,
        for_backward: bool = False,
        saved: SavedProducts | None = None,
    ) -> None:
        q, k, v, log_alpha, beta = inputs
        self.scale, self.heads, self.widths = scale, q.shape[2], layout.segment.widths
        self.layout, self.workspace, self.saved = layout, workspace, saved
        self.length, chunks = layout.segment.chunk, sum(self.widths) * self.heads
        keys, values = k.shape[3], v.shape[3]
        workspace.start_segment(chunks)
        self.q, self.k, self.alpha = (self._by_position(x) for x in (q, k, log_alpha))
        self.alpha.exp_()
        self.beta_XC = workspace.empty(chunks, self.length)
        layout.gather(beta.unsqueeze(-1), self.with_heads(self.beta_XC.unsqueeze(-1)))
        self.products = intra_chunk_forward(
            self.q, self.k, self.alpha, workspace, None if saved is None else saved[:2]
        )
        decay = self.products.decay(out=workspace.empty(*self.k.shape))
        self.total_XK1 = workspace.empty(chunks, keys, 1)
        self.total_XK1.squeeze(-1).copy_(decay[-1, -1])
        # Rows that read the state. Backward puts those of the keys before those of the queries.
        self.reads = workspace.empty(chunks, (2 if for_backward else 1) * self.length, keys)
        self.qG_XCK = self.reads[:, -self.length :]
        torch.mul(self.q, decay, out=by_position(self.qG_XCK, SUB_CHUNK))
        self.inverse_XCC, self.solved = self._solve(v, decay) if saved is None else saved[2:]
        workspace.free(decay)
        # Z = error - kG S. Where `solved` was saved after forward, the error is Z already.
        self.error_XCV, self.kG_XCK = self.solved[:, :, :values], self.solved[:, :, values:]
        kg = self.products.kg
        weighted = workspace.empty(*kg.shape) if for_backward else kg
        self.kg_beta_XKC = torch.mul(kg, self.beta_XC[:, None, :], out=weighted)

    def _solve(self, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """(I + Akk beta)^-1, and its products with v and with k G."""
        values, workspace = v.shape[3], self.workspace
        chunks, length = self.beta_XC.shape
        sides = workspace.empty(chunks, length, values + self.k.shape[3])
        self.layout.gather(v, self.with_heads(sides[:, :, :values]))
        torch.mul(self.k, decay, out=by_position(sides[:, :, values:], SUB_CHUNK))
        lower = workspace.empty(chunks, length, length)
        torch.mul(self.products.Akk, self.beta_XC[:, None, :], out=lower)
        identity = torch.eye(length, dtype=lower.dtype, device=lower.device).expand_as(lower)
        inverse = torch.linalg.solve_triangular(lower, identity, upper=False, unitriangular=True)
        solved = torch.bmm(inverse, sides, out=workspace.empty(*sides.shape))
        workspace.free(sides, lower)
        return inverse, solved

    def products_to_save(self) -> SavedProducts:
        """After forward."""
        return self.products.Akk, self.products.Aqk, self.inverse_XCC, self.solved

    def _by_position(self, x: Tensor) -> Tensor:
        """[P, M, X, K]"""
        lead = SUB_CHUNK, self.length // SUB_CHUNK, sum(self.widths)
        made = self.workspace.empty(*lead, *x.shape[2:])
        self.layout.gather(x, made)
        return made.flatten(2, 3)

    def with_heads(self, x_XCd: Tensor) -> Tensor:
        """[P, M, N, H, d], a view."""
        return by_position(x_XCd, SUB_CHUNK).unflatten(2, (-1, self.heads))

    def forward(self, state_WKV: Tensor) -> Tensor:
        """o [X, C, V]; the state is advanced to the segment's end in place."""
        out_XCV = self.workspace.empty(*self.error_XCV.shape)
        for state, qG, out, *chunk in self._by_chunk(state_WKV, self.qG_XCK, out_XCV, *self._update):
            torch.bmm(qG, state, out=out)
            _update_state(state, chunk, error_is_complete=False)
        Aqk = self.products.Aqk
        Aqk = torch.mul(Aqk, self.beta_XC[:, None, :], out=self.workspace.empty(*Aqk.shape))
        return out_XCV.baddbmm_(Aqk, self.error_XCV, beta=self.scale, alpha=self.scale)

    def _recompute_states(self, state_WKV: Tensor) -> Tensor:
        """The states before every chunk [X, V, K]; the error gets its part of the state."""
        before_XVK = self.workspace.empty(len(self.reads), *state_WKV.mT.shape[1:])
        for state, before, *chunk in self._by_chunk(state_WKV, before_XVK, *self._update):
            before.copy_(state.mT)
            _update_state(state, chunk, error_is_complete=self.saved is not None)
        return before_XVK

    @property
    def _update(self) -> tuple[Tensor, ...]:
        return self.kG_XCK, self.error_XCV, self.kg_beta_XKC, self.total_XK1

    def _by_chunk(self, states: Tensor, *chunks: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The states with the first chunks of all ranges, then with the second chunks, and so on."""
        sizes = [width * self.heads for width in self.widths]
        # Split at once: slicing a tensor takes a CPU as long as adding two small ones.
        return zip((states[:size] for size in sizes), *(x.split(sizes) for x in chunks), strict=True)

    def backward(
        self, state_WKV: Tensor, grad_out: Tensor | None, grad_WKV: Tensor, want_rest: bool
    ) -> SegmentGradients:
        """Gradients of the segment's inputs; that of the state goes back to the segment's start in place.

        state_WKV: the states at the segment's start, which are overwritten. grad_out [B, T, H, V]. The object
        cannot be used afterwards.
        """
        grad_v, grad_beta, grads = self._backward_of_states(state_WKV, grad_out, grad_WKV, want_rest)
        if self.saved is None:
            self.workspace.free(self.products.Akk, self.products.Aqk, self.solved)
            del self.inverse_XCC
        rest = None if grads is None else self._backward_of_products(grads)
        return SegmentGradients(grad_v, grad_beta, rest)

    def _backward_of_states(
        self, state_WKV: Tensor, grad_out: Tensor | None, grad_WKV: Tensor, want_rest: bool
    ) -> tuple[Tensor, Tensor, _ProductGradients | None]:
        """The gradients of v [X, C, V] and beta [X, C, 1], and of the products that meet the states."""
        length, workspace, products = self.length, self.workspace, self.products
        before_XVK = self._recompute_states(state_WKV)
        error, beta_XC1 = self.error_XCV, self.beta_XC[:, :, None]
        torch.mul(self.kG_XCK, -beta_XC1, out=self.reads[:, :length])
        workspace.free(self.kg_beta_XKC)
        # Gradients of beta Z in the first half, of the outputs (scaled) in the second.
        chunks, _, values = error.shape
        grads = workspace.empty(chunks, 2 * length, values)
        grad_written, grad_o = grads[:, :length], grads[:, length:]
        if grad_out is None:
            grads.zero_()
        else:
            self.layout.gather(grad_out, self.with_heads(grad_o))
            grad_o.mul_(self.scale)
            torch.bmm(products.Aqk.mT, grad_o, out=grad_written)
        after_XVK = workspace.empty(*before_XVK.shape)
        operands = after_XVK, grad_written, products.kg.mT, self.total_XK1, self.reads.mT, grads
        by_chunk = list(self._by_chunk(grad_WKV, *operands))
        for grad, after, written, kg, total, reads, both in reversed(by_chunk):
            after.copy_(grad.mT)
            written.baddbmm_(kg, grad)
            grad.mul_(total).baddbmm_(reads, both)
        workspace.free(self.reads, products.kg)

        weighted = torch.mul(self.inverse_XCC, beta_XC1, out=workspace.empty(chunks, length, length))
        grad_v = torch.bmm(weighted.mT, grad_written, out=workspace.empty(*error.shape))
        grad_written.baddbmm_(products.Akk.mT, grad_v, alpha=-1)
        grad_beta = grad_written.mul_(error).sum(-1, keepdim=True)
        if not want_rest:
            return grad_v, grad_beta, None
        torch.neg(grad_v, out=grad_written)
        written_XCV = torch.mul(error, beta_XC1, out=workspace.empty(*error.shape))
        written_XVC = workspace.empty(chunks, values, length).copy_(written_XCV.mT)
        grad_A = torch.bmm(grads, written_XVC, out=workspace.empty(chunks, 2 * length, length))
        keys = self.k.shape[-1]
        grad_kg = torch.bmm(written_XCV, after_XVK, out=workspace.empty(chunks, length, keys))
        starts = torch.bmm(grads, before_XVK, out=workspace.empty(chunks, 2 * length, keys))
        total = before_XVK.mul_(after_XVK).sum(1).mul_(self.total_XK1.squeeze(-1))
        workspace.free(grads, written_XCV, written_XVC, before_XVK, after_XVK, weighted)
        return grad_v, grad_beta, _ProductGradients(grad_A, grad_kg, starts, total)

    def _backward_of_products(self, grads: _ProductGradients) -> QueryKeyGradients:
        length, workspace = self.length, self.workspace
        made = intra_chunk_backward(self.q, self.k, self.alpha, self.products, grads.A, grads.kg, workspace)
        decay = self.products.decay(out=workspace.empty(*self.k.shape))
        grad, reads = (workspace.empty(*self.k.shape) for _ in range(2))
        torch.mul(by_position(grads.starts[:, :length], SUB_CHUNK), decay, out=grad)
        made.k.add_(grad)
        torch.mul(grad, self.k, out=reads)
        torch.mul(by_position(grads.starts[:, length:], SUB_CHUNK), decay, out=grad)
        made.q.add_(grad)
        reads.addcmul_(grad, self.q)
        # A token's decay acts on all later reads of the chunk's first state.
        suffix_sums_(reads)
        later = grads.total
        for m in reversed(range(reads.shape[1])):
            reads[:, m] += later
            later = reads[0, m]
        made.log_alpha.add_(reads)
        return made


def _update_state(state: Tensor, chunks: Sequence[Tensor], error_is_complete: bool) -> None:
    """Advance states over one chunk each. The error gets its part of the state, unless it has it."""
    kG, error, kg_beta, total = chunks
    if not error_is_complete:
        error.baddbmm_(kG, state, alpha=-1)
    state.mul_(total).baddbmm_(kg_beta, error)
