"""One segment in the chunkwise (WY) form: forward from the states at its start, and backward to them.

Legend: C tokens of a chunk, X chunks x heads, K key size, V value size, W streams x heads; q, k and alpha are
[P, M, X, K] with C = M * P (see between.py), all else has a chunk's tokens in rows, [X, C, ...].
Per chunk and head, with S the state before it, A_i = alpha_0 ... alpha_i, and `keys`, `queries`, `k_end` the
products of between.py:
    error   Z = (I + keys beta)^-1 (v - (k A) S)    of what the state answers to the keys, token by token
    output  o = scale ((q A) S + queries (beta Z))
    state   S' = A_{C-1} S + k_end^T (beta Z)
All chunks' work without S comes first, in a few large products; only S itself goes from chunk to chunk.

On a CPU a batched product with its second factor transposed in place is many times slower than with a
transposed copy (its first factor may be): hence the names that end in their layout, and the copies.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.delta_attention.between import (
    Grads,
    by_places,
    chunk_products,
    chunk_products_backward,
    suffix_sums_,
)
from oomph.ops.delta_attention.buffers import Buffers
from oomph.ops.delta_attention.layout import Layout


@dataclass(frozen=True)
class Gradients:
    """Of a segment's inputs: v [X, C, V], beta [X, C, 1], and `rest`, of q, k and log alpha, where wanted."""

    v: Tensor
    beta: Tensor
    rest: Grads | None


# Of a segment, what forward may keep for backward: keys and queries, the inverse [X, C, C], and `solved`.
Kept = tuple[Tensor, Tensor, Tensor, Tensor]


def kept_per_token(keys: int, values: int, chunk: int) -> int:
    """Numbers per token and head."""
    return 3 * chunk + keys + values


class Chunks:
    """A segment's inputs in chunks, and what follows from them without a state.

    `again`: for backward, which makes it all again, but for what was kept, and then goes the other way.
    """

    def __init__(
        self,
        layout: Layout,
        inputs: tuple[Tensor, ...],
        scale: float,
        buffers: Buffers,
        again: bool = False,
        kept: Kept | None = None,
    ) -> None:
        q, k, v, log_alpha, beta = inputs
        self.scale, self.heads, self.widths = scale, q.shape[2], layout.segment.widths
        self.layout, self.buffers, self.places = layout, buffers, layout.places
        self.length, chunks = layout.segment.chunk, sum(self.widths) * self.heads
        keys, values = k.shape[3], v.shape[3]
        buffers.begin(chunks)
        self.q, self.k, self.alpha = (self._in_places(x) for x in (q, k, log_alpha))
        self.alpha.exp_()
        self.beta_XC = buffers.new(chunks, self.length)
        layout.take(beta.unsqueeze(-1), self.rows_of_heads(self.beta_XC.unsqueeze(-1)))
        self.kept = kept
        pairs = None if kept is None else kept[:2]
        self.products = chunk_products(self.q, self.k, self.alpha, buffers, pairs)
        decay = self.products.decay(out=buffers.new(*self.k.shape))
        self.total_XK1 = buffers.new(chunks, keys, 1)
        self.total_XK1.squeeze(-1).copy_(decay[-1, -1])
        # Rows that the state answers: with `again` there is room before them for those of the keys.
        self.reads = buffers.new(chunks, (2 if again else 1) * self.length, keys)
        self.q_start_XCK = self.reads[:, -self.length :]
        torch.mul(self.q, decay, out=by_places(self.q_start_XCK, self.places))
        self.inverse_XCC, self.solved = self._solve(v, decay) if kept is None else kept[2:]
        buffers.free(decay)
        # Z = error - k_start S; where `solved` was kept the error is Z already.
        self.error_XCV, self.k_start_XCK = self.solved[:, :, :values], self.solved[:, :, values:]
        k_end = self.products.k_end
        weighted = buffers.new(*k_end.shape) if again else k_end
        self.k_written_XKC = torch.mul(k_end, self.beta_XC[:, None, :], out=weighted)

    def _solve(self, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse, and its products with v and with the keys decayed from the chunk's start."""
        values, buffers = v.shape[3], self.buffers
        chunks, length = self.beta_XC.shape
        sides = buffers.new(chunks, length, values + self.k.shape[3])
        self.layout.take(v, self.rows_of_heads(sides[:, :, :values]))
        torch.mul(self.k, decay, out=by_places(sides[:, :, values:], self.places))
        lower = buffers.new(chunks, length, length)
        inverse = _inverse(torch.mul(self.products.keys, self.beta_XC[:, None, :], out=lower))
        solved = torch.bmm(inverse, sides, out=buffers.new(*sides.shape))
        buffers.free(sides, lower)
        return inverse, solved

    def to_keep(self) -> Kept:
        """After forward."""
        return self.products.keys, self.products.queries, self.inverse_XCC, self.solved

    def _in_places(self, x: Tensor) -> Tensor:
        """[P, M, X, K]"""
        lead = self.places, self.length // self.places, sum(self.widths)
        made = self.buffers.new(*lead, *x.shape[2:])
        self.layout.take(x, made)
        return made.flatten(2, 3)

    def rows_of_heads(self, x_XCd: Tensor) -> Tensor:
        """[P, M, N, H, d], a view"""
        return by_places(x_XCd, self.places).unflatten(2, (-1, self.heads))

    def forward(self, state_WKV: Tensor) -> Tensor:
        """o [X, C, V]; the state is moved on to the segment's end in place."""
        out_XCV = self.buffers.new(*self.error_XCV.shape)
        for state, q_start, out, *chunk in self._depths(state_WKV, self.q_start_XCK, out_XCV, *self._moving):
            torch.bmm(q_start, state, out=out)
            _move(state, chunk, complete=False)
        queries = self.products.queries
        queries = torch.mul(queries, self.beta_XC[:, None, :], out=self.buffers.new(*queries.shape))
        return out_XCV.baddbmm_(queries, self.error_XCV, beta=self.scale, alpha=self.scale)

    def _states_again(self, state_WKV: Tensor) -> Tensor:
        """The states before every chunk [X, V, K]; the error gets its part of the state."""
        before_XVK = self.buffers.new(len(self.reads), *state_WKV.mT.shape[1:])
        for state, before, *chunk in self._depths(state_WKV, before_XVK, *self._moving):
            before.copy_(state.mT)
            _move(state, chunk, complete=self.kept is not None)
        return before_XVK

    @property
    def _moving(self) -> tuple[Tensor, ...]:
        return self.k_start_XCK, self.error_XCV, self.k_written_XKC, self.total_XK1

    def _depths(self, states: Tensor, *chunks: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Depth by depth: the states, and what belongs to the chunks that meet them."""
        sizes = [width * self.heads for width in self.widths]
        # Split at once: to cut a tensor takes a CPU as long as to add up two small ones.
        return zip((states[:size] for size in sizes), *(x.split(sizes) for x in chunks), strict=True)

    def backward(
        self, state_WKV: Tensor, grad_out: Tensor | None, grad_WKV: Tensor, want_rest: bool
    ) -> Gradients:
        """Gradients of the segment's inputs; that of the state is moved back to the segment's start in place.

        state_WKV: the states at the segment's start, which are overwritten. grad_out [B, T, H, V]. The chunks
        are used up.
        """
        grad_v, grad_beta, met = self._backward_of_states(state_WKV, grad_out, grad_WKV, want_rest)
        if self.kept is None:
            self.buffers.free(self.products.keys, self.products.queries, self.solved)
            del self.inverse_XCC
        rest = None if met is None else self._backward_of_products(met)
        return Gradients(grad_v, grad_beta, rest)

    def _backward_of_states(
        self, state_WKV: Tensor, grad_out: Tensor | None, grad_WKV: Tensor, want_rest: bool
    ) -> tuple[Tensor, Tensor, "_Met | None"]:
        """The gradients of v [X, C, V] and beta [X, C, 1], and of all that meets the states."""
        length, buffers, products = self.length, self.buffers, self.products
        before_XVK = self._states_again(state_WKV)
        error, beta_XC1 = self.error_XCV, self.beta_XC[:, :, None]
        torch.mul(self.k_start_XCK, -beta_XC1, out=self.reads[:, :length])
        buffers.free(self.k_written_XKC)
        # Of beta Z above, of the outputs (scaled) below.
        chunks, _, values = error.shape
        grads = buffers.new(chunks, 2 * length, values)
        grad_written, grad_o = grads[:, :length], grads[:, length:]
        if grad_out is None:
            grads.zero_()
        else:
            self.layout.take(grad_out, self.rows_of_heads(grad_o))
            grad_o.mul_(self.scale)
            torch.bmm(products.queries.mT, grad_o, out=grad_written)
        after_XVK = buffers.new(*before_XVK.shape)
        met = after_XVK, grad_written, products.k_end.mT, self.total_XK1, self.reads.mT, grads
        for grad, after, written, k_end, total, reads, both in reversed(list(self._depths(grad_WKV, *met))):
            after.copy_(grad.mT)
            written.baddbmm_(k_end, grad)
            grad.mul_(total).baddbmm_(reads, both)
        buffers.free(self.reads, products.k_end)

        weighted = torch.mul(self.inverse_XCC, beta_XC1, out=buffers.new(chunks, length, length))
        grad_v = torch.bmm(weighted.mT, grad_written, out=buffers.new(*error.shape))
        grad_written.baddbmm_(products.keys.mT, grad_v, alpha=-1)
        grad_beta = grad_written.mul_(error).sum(-1, keepdim=True)
        if not want_rest:
            return grad_v, grad_beta, None
        torch.neg(grad_v, out=grad_written)
        written_XCV = torch.mul(error, beta_XC1, out=buffers.new(*error.shape))
        written_XVC = buffers.new(chunks, values, length).copy_(written_XCV.mT)
        pairs = torch.bmm(grads, written_XVC, out=buffers.new(chunks, 2 * length, length))
        keys = self.k.shape[-1]
        at_end = torch.bmm(written_XCV, after_XVK, out=buffers.new(chunks, length, keys))
        starts = torch.bmm(grads, before_XVK, out=buffers.new(chunks, 2 * length, keys))
        whole = before_XVK.mul_(after_XVK).sum(1).mul_(self.total_XK1.squeeze(-1))
        buffers.free(grads, written_XCV, written_XVC, before_XVK, after_XVK, weighted)
        return grad_v, grad_beta, _Met(pairs, at_end, starts, whole)

    def _backward_of_products(self, met: "_Met") -> Grads:
        length, places, buffers = self.length, self.places, self.buffers
        made = chunk_products_backward(
            self.q, self.k, self.alpha, self.products, met.pairs, met.k_end, buffers
        )
        decay = self.products.decay(out=buffers.new(*self.k.shape))
        grad, reads = (buffers.new(*self.k.shape) for _ in range(2))
        torch.mul(by_places(met.starts[:, :length], places), decay, out=grad)
        made.k.add_(grad)
        torch.mul(grad, self.k, out=reads)
        torch.mul(by_places(met.starts[:, length:], places), decay, out=grad)
        made.q.add_(grad)
        reads.addcmul_(grad, self.q)
        # A token's decay acts on all that reads the chunk's first state from there on.
        suffix_sums_(reads)
        later = met.whole
        for m in reversed(range(reads.shape[1])):
            reads[:, m] += later
            later = reads[0, m]
        made.log_alpha.add_(reads)
        return made


@dataclass(frozen=True)
class _Met:
    """Gradients of the products and of what meets the states.

    pairs [X, 2 C, C]: of keys, then of queries, with anything above the diagonals; k_end [X, C, K]; starts
    [X, 2 C, K]: of the keys, then of the queries, decayed from the chunk's start; whole [X, K]: of the
    logarithm of the chunk's decay.
    """

    pairs: Tensor
    k_end: Tensor
    starts: Tensor
    whole: Tensor


def _move(state: Tensor, chunks: Sequence[Tensor], complete: bool) -> None:
    """States, from before some chunks to after them. The error of these is completed, if it is not yet."""
    k_start, error, k_written, total = chunks
    if not complete:
        error.baddbmm_(k_start, state, alpha=-1)
    state.mul_(total).baddbmm_(k_written, error)


def _inverse(lower: Tensor) -> Tensor:
    """(I + L)^-1 of the strictly lower L"""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False, unitriangular=True)
