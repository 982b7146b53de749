"""Products of the keys and queries of a chunk with the decay between their tokens, in plain torch.

Legend: P tokens of a sub-chunk, M sub-chunks of a chunk, C = M * P tokens of a chunk, X chunks x heads,
Y = M * X sub-chunks x heads, K key size. With D_ij = alpha_{j+1} ... alpha_i per channel (1 for i = j):
    Akk_ij = sum_d k_i k_j D_ij     for j < i
    Aqk_ij = sum_d q_i k_j D_ij     for j <= i
    kg_j   = k_j D_{C-1, j}         the keys decayed to the end of the chunk

Every factor is a product of alphas, hence in [0, 1]: nothing can overflow, and a decay so strong that alpha
rounds to 0 is a factor of 0. The usual form, exp(g_i - g_j) with g the cumulative sum of log alpha, loses
digits where g is large. Within a sub-chunk, a loop over tokens carries the keys along and multiplies them by
alpha_i at token i. Between sub-chunks, keys are carried to the end of their own sub-chunk and through the
following ones, and meet the rows of a later sub-chunk decayed from its start, in matrix products.

Inputs are [P, M, X, K], so that one token of every sub-chunk is a contiguous slab and a step of a loop is one
operation on slabs (torch's cumprod and cumsum along a strided dimension are many times slower).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the carried keys that the backward of sub-chunks holds at a time. Less means more, shorter operations.
_CARRIED_BYTES = 16 << 20
_ALIGNMENT = 16  # numbers: a cache line of float32


class Workspace:
    """Uninitialised tensors of one dtype for segments that request the same ones in the same order.

    The CPU allocator returns freed memory to the system, and touching new pages costs about as much as the
    arithmetic on them: with torch.empty for every temporary, a fifth of a call's time went there. The first
    segment decides the offsets; later segments that are no larger get theirs at the same offsets.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self.dtype = like, dtype
        self._chunks = self._requests = 0
        self._spans: list[tuple[int, int, int]] = []  # (block, start, stop) of each request, in order
        self._reset()

    def _reset(self) -> None:
        self._spans.clear()
        self._blocks: list[Tensor] = []
        self._free: list[tuple[int, int, int]] = []
        # By the id of the tensor, which the entry keeps alive.
        self._used: dict[int, tuple[Tensor, tuple[int, int, int]]] = {}

    def start_segment(self, chunks: int) -> None:
        """All tensors of the segment before may be overwritten."""
        self._used.clear()
        self._requests = 0
        if chunks > self._chunks:
            self._reset()
            self._chunks = chunks

    def empty(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        first_time = self._requests == len(self._spans)
        if first_time:
            self._spans.append(self._allocate(-(-count // _ALIGNMENT) * _ALIGNMENT))
        span = self._spans[self._requests]
        self._requests += 1
        made = self._blocks[span[0]][span[1] : span[1] + count].view(shape)
        if first_time:
            self._used[id(made)] = made, span
        return made

    def zeros(self, *shape: int) -> Tensor:
        return self.empty(*shape).zero_()

    def free(self, *tensors: Tensor) -> None:
        """Tensors that `empty` returned, not views of them, may be returned again."""
        for tensor in tensors:
            if id(tensor) in self._used:
                block, start, stop = self._used.pop(id(tensor))[1]
                for other in [each for each in self._free if each[0] == block]:
                    if other[2] == start or other[1] == stop:  # adjacent: merge
                        self._free.remove(other)
                        start, stop = min(start, other[1]), max(stop, other[2])
                self._free.append((block, start, stop))

    def _allocate(self, count: int) -> tuple[int, int, int]:
        """From the smallest free span that is large enough, or else a new block."""
        fitting = [span for span in self._free if span[2] - span[1] >= count]
        if not fitting:
            self._blocks.append(self._like.new_empty(count, dtype=self.dtype))
            return len(self._blocks) - 1, 0, count
        block, start, stop = found = min(fitting, key=lambda span: span[2] - span[1])
        self._free.remove(found)
        if stop - start > count:
            self._free.append((block, start + count, stop))
        return block, start, start + count


# Chunks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IntraChunkProducts:
    """Akk, Aqk [X, C, C], zero above their diagonals, and kg [X, K, C].

    k_sub_end [P, M, X, K]: keys at the ends of their sub-chunks. decay_sub [P, M, X, K]: from the start of a
    sub-chunk to each of its tokens, inclusive. decay_before [M, X, K]: from the start of the chunk to that of
    a sub-chunk.
    """

    Akk: Tensor
    Aqk: Tensor
    kg: Tensor
    k_sub_end: Tensor
    decay_sub: Tensor
    decay_before: Tensor

    def decay(self, out: Tensor) -> Tensor:
        """[P, M, X, K]: from the chunk's start to each token, inclusive."""
        return torch.mul(self.decay_sub, self.decay_before, out=out)


@dataclass(frozen=True)
class QueryKeyGradients:
    """Of q, k and log alpha, [P, M, X, K] each."""

    q: Tensor
    k: Tensor
    log_alpha: Tensor


def by_position(x_XCd: Tensor, positions: int) -> Tensor:
    """[P, M, X, d], a view."""
    return x_XCd.unflatten(1, (-1, positions)).permute(2, 1, 0, 3)


def intra_chunk_forward(
    q: Tensor, k: Tensor, alpha: Tensor, workspace: Workspace, saved: tuple[Tensor, Tensor] | None = None
) -> IntraChunkProducts:
    """`saved`: Akk and Aqk, where forward saved them for backward."""
    count, decay_sub, before = k.shape[1], workspace.empty(*k.shape), workspace.empty(*k.shape[1:])
    decay_sub[0] = alpha[0]
    for i in range(1, len(alpha)):
        torch.mul(decay_sub[i - 1], alpha[i], out=decay_sub[i])
    before[0] = 1.0
    for m in range(1, count):
        torch.mul(before[m - 1], decay_sub[-1, m - 1], out=before[m])
    if saved is None:
        sub = _sub_chunk_forward(q.flatten(1, 2), k.flatten(1, 2), alpha.flatten(1, 2), workspace)
        Akk, Aqk = (_to_diagonal(x, count, workspace) for x in (sub.Akk, sub.Aqk))
        workspace.free(sub.Akk, sub.Aqk)
        k_sub_end = sub.k_end.view(k.shape)
        kg = _across_sub_chunks(q, k, decay_sub, k_sub_end, workspace, (Akk, Aqk))
    else:
        Akk, Aqk = saved
        k_sub_end = _sub_chunk_k_end(k.flatten(1, 2), alpha.flatten(1, 2), workspace).view(k.shape)
        kg = _across_sub_chunks(q, k, decay_sub, k_sub_end, workspace, None)
    return IntraChunkProducts(Akk, Aqk, kg, k_sub_end, decay_sub, before)


def _across_sub_chunks(
    q: Tensor,
    k: Tensor,
    decay_sub: Tensor,
    k_sub_end: Tensor,
    workspace: Workspace,
    into: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Keys carried to the chunk's end [X, K, C]; `into` (Akk, Aqk) gets the products across sub-chunks."""
    positions, count, chunks, size = k.shape
    carried = workspace.empty(chunks, size, count * positions)
    carried.view(chunks, size, count, positions).copy_(k_sub_end.permute(2, 3, 1, 0))
    rows = workspace.empty(chunks, 2 * positions, size)
    for m in range(1, count):
        own, earlier = slice(m * positions, (m + 1) * positions), slice(0, m * positions)
        if into is not None:
            products = workspace.empty(chunks, 2 * positions, m * positions)
            torch.bmm(_decayed_rows(rows, q, k, decay_sub, m), carried[:, :, earlier], out=products)
            into[0][:, own, earlier], into[1][:, own, earlier] = (
                products[:, :positions],
                products[:, positions:],
            )
            workspace.free(products)
        carried[:, :, earlier] *= decay_sub[-1, m].unsqueeze(-1)
    workspace.free(rows)
    return carried


def _decayed_rows(rows: Tensor, q: Tensor, k: Tensor, decay_sub: Tensor, m: int) -> Tensor:
    """[X, 2 P, K]: the keys of sub-chunk m, then its queries, decayed from the sub-chunk's start."""
    positions = k.shape[0]
    decay = decay_sub[:, m].transpose(0, 1)
    torch.mul(k[:, m].transpose(0, 1), decay, out=rows[:, :positions])
    torch.mul(q[:, m].transpose(0, 1), decay, out=rows[:, positions:])
    return rows


def _to_diagonal(sub_PPY: Tensor, count: int, workspace: Workspace) -> Tensor:
    """[X, C, C] with the sub-chunks' products on the block diagonal, zeros elsewhere."""
    positions, chunks = sub_PPY.shape[0], sub_PPY.shape[2] // count
    whole = workspace.zeros(chunks, count * positions, count * positions)
    blocks = whole.view(chunks, count, positions, count, positions)
    blocks.diagonal(0, 1, 3).copy_(sub_PPY.unflatten(2, (count, chunks)).permute(3, 0, 1, 2))
    return whole


def _from_diagonal(whole_XCC: Tensor, count: int, workspace: Workspace) -> Tensor:
    """[P, P, Y], the reverse of _to_diagonal."""
    chunks, size = whole_XCC.shape[0], whole_XCC.shape[1] // count
    blocks = whole_XCC.unflatten(2, (count, size)).unflatten(1, (count, size))
    out = workspace.empty(size, size, count * chunks)
    out.view(size, size, count, chunks).copy_(blocks.diagonal(0, 1, 3).permute(1, 2, 3, 0))
    return out


def intra_chunk_backward(
    q: Tensor,
    k: Tensor,
    alpha: Tensor,
    products: IntraChunkProducts,
    grad_A: Tensor,
    grad_kg: Tensor,
    workspace: Workspace,
) -> QueryKeyGradients:
    """From the gradients grad_A [X, 2 C, C] of Akk, then Aqk, and grad_kg [X, C, K]; both are freed.

    Entries of grad_A above the diagonals are not read.
    """
    positions, count, chunks, size = k.shape
    grad_Akk, grad_Aqk = grad_A[:, : count * positions], grad_A[:, count * positions :]
    carried_at = _carried_keys(products, workspace)
    grad_carried = grad_kg
    # Of the decayed rows, and of the decay over whole sub-chunks; sub-chunk 0 has neither.
    grad_rows = workspace.empty(count, chunks, 2 * positions, size)
    grad_decay = workspace.empty(count, chunks, size)
    rows = workspace.empty(chunks, 2 * positions, size)
    grad_rows[0], grad_decay[0] = 0.0, 0.0
    for m in reversed(range(1, count)):
        own, earlier = slice(m * positions, (m + 1) * positions), slice(0, m * positions)
        carried = carried_at.pop()
        grad_met = workspace.empty(chunks, 2 * positions, m * positions)
        temporary = workspace.empty(*carried.shape)
        torch.cat((grad_Akk[:, own, earlier], grad_Aqk[:, own, earlier]), 1, out=grad_met)
        torch.bmm(grad_met, carried, out=grad_rows[m])
        grad_carried[:, earlier] *= products.decay_sub[-1, m].unsqueeze(1)
        torch.sum(torch.mul(grad_carried[:, earlier], carried, out=temporary), 1, out=grad_decay[m])
        _decayed_rows(rows, q, k, products.decay_sub, m)
        grad_carried[:, earlier] += torch.bmm(grad_met.transpose(1, 2), rows, out=temporary)
        workspace.free(grad_met, temporary, carried)
    workspace.free(rows)
    grad_k_end = workspace.empty(*k.shape).copy_(by_position(grad_carried, positions)).flatten(1, 2)
    sub = _SubChunkProducts(
        _from_diagonal(grad_Akk, count, workspace), _from_diagonal(grad_Aqk, count, workspace), grad_k_end
    )
    workspace.free(grad_A, grad_kg)
    flat = q.flatten(1, 2), k.flatten(1, 2), alpha.flatten(1, 2)
    grads = QueryKeyGradients(*(x.view(k.shape) for x in _sub_chunk_backward(*flat, sub, workspace)))
    if count > 1:
        by_row = grad_rows.permute(2, 0, 1, 3)  # [2 P, M, X, K]
        reads = grad_k_end.view(k.shape)
        grad = torch.mul(by_row[:positions], products.decay_sub, out=workspace.empty(*k.shape))
        grads.k.add_(grad)
        torch.mul(grad, k, out=reads)
        torch.mul(by_row[positions:], products.decay_sub, out=grad)
        grads.q.add_(grad)
        reads.addcmul_(grad, q)
        reads[-1] += grad_decay
        grads.log_alpha.add_(suffix_sums_(reads))
    return grads


def _carried_keys(products: IntraChunkProducts, workspace: Workspace) -> list[Tensor]:
    """What sub-chunks 1, 2, ... meet: all earlier keys [X, tokens, K] at the end of the sub-chunk before."""
    positions, count, chunks, size = products.k_sub_end.shape
    carried: list[Tensor] = []
    for m in range(1, count):
        keys = workspace.empty(chunks, m * positions, size)
        if carried:
            decay = products.decay_sub[-1, m - 1].unsqueeze(1)
            torch.mul(carried[-1], decay, out=keys[:, : (m - 1) * positions])
        keys[:, (m - 1) * positions :] = products.k_sub_end[:, m - 1].transpose(0, 1)
        carried.append(keys)
    return carried


def suffix_sums_(x: Tensor) -> Tensor:
    """Along the first dimension, in place: x_i + x_{i+1} + ..."""
    for i in reversed(range(len(x) - 1)):
        x[i] += x[i + 1]
    return x


# Sub-chunks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SubChunkProducts:
    """Akk, Aqk [P, P, Y] (row, column, sub-chunk), zero above their diagonals; k_end [P, Y, K]."""

    Akk: Tensor
    Aqk: Tensor
    k_end: Tensor


def _sub_chunk_forward(q: Tensor, k: Tensor, alpha: Tensor, workspace: Workspace) -> _SubChunkProducts:
    """q, k, alpha [P, Y, K]."""
    length, count, _ = k.shape
    Akk, Aqk = (workspace.zeros(length, length, count) for _ in range(2))
    carried, product = workspace.empty(*k.shape), workspace.empty(*k.shape)
    for i in range(length):
        if i:
            carried[:i].mul_(alpha[i])  # now k_j D_ij
            torch.sum(torch.mul(carried[:i], k[i], out=product[:i]), -1, out=Akk[i, :i])
        carried[i] = k[i]
        torch.sum(torch.mul(carried[: i + 1], q[i], out=product[: i + 1]), -1, out=Aqk[i, : i + 1])
    workspace.free(product)
    return _SubChunkProducts(Akk, Aqk, carried)


def _sub_chunk_k_end(k: Tensor, alpha: Tensor, workspace: Workspace) -> Tensor:
    k_end, decay = workspace.empty(*k.shape), workspace.empty(*k.shape[1:])
    k_end[-1], decay[:] = k[-1], alpha[-1]
    for j in reversed(range(k.shape[0] - 1)):
        torch.mul(k[j], decay, out=k_end[j])
        decay.mul_(alpha[j])
    workspace.free(decay)
    return k_end


def _sub_chunk_backward(
    q: Tensor, k: Tensor, alpha: Tensor, grad: _SubChunkProducts, workspace: Workspace
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and log alpha [P, Y, K]. grad.k_end is overwritten.

    That of log alpha_i is a sum over the pairs j < i <= i' that alpha_i lies between, and of nothing else:
    the shorter form, a difference of running sums over all pairs, cancels to noise where the decay is strong.
    """
    grads = tuple(workspace.empty(*k.shape) for _ in range(3))
    length, count, channels = k.shape
    carried_bytes = length * (length + 1) // 2 * channels * k.dtype.itemsize
    step = min(count, max(1, _CARRIED_BYTES // max(1, carried_bytes)))
    rows = [workspace.empty(i + 1, step, channels) for i in range(1, length)]
    product = workspace.empty(length, step, channels)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        _sub_chunk_backward_part(
            (q[:, part], k[:, part], alpha[:, part]),
            _SubChunkProducts(grad.Akk[:, :, part], grad.Aqk[:, :, part], grad.k_end[:, part]),
            tuple(x[:, part] for x in grads),
            [row[:, : part.stop - start] for row in rows],
            product[:, : part.stop - start],
        )
    workspace.free(product, *rows)
    return grads  # type: ignore[return-value]


def _sub_chunk_backward_part(
    inputs: tuple[Tensor, ...],
    grad: _SubChunkProducts,
    into: tuple[Tensor, ...],
    carried_rows: list[Tensor],
    product: Tensor,
) -> None:
    q, k, alpha = inputs
    grad_q, grad_k, grad_log_alpha = into
    rows = [k[:1], *carried_rows]  # rows[i][j] = k_j D_ij
    for i in range(1, k.shape[0]):
        torch.mul(rows[i - 1], alpha[i], out=rows[i][:i])
        rows[i][i] = k[i]
    grad_carried = grad.k_end  # from the last token back
    for i in reversed(range(k.shape[0])):
        row, upto = rows[i], slice(0, i + 1)
        to_Akk, to_Aqk = grad.Akk[i, :i, :, None], grad.Aqk[i, upto, :, None]
        grad_carried[upto].addcmul_(to_Aqk, q[i])
        torch.sum(torch.mul(to_Aqk, row, out=product[upto]), 0, out=grad_q[i])
        if i:
            grad_carried[:i].addcmul_(to_Akk, k[i])
            torch.sum(torch.mul(to_Akk, row[:i], out=product[:i]), 0, out=grad_k[i])
            grad_k[i] += grad_carried[i]
            torch.sum(torch.mul(grad_carried[:i], row[:i], out=product[:i]), 0, out=grad_log_alpha[i])
            grad_carried[:i].mul_(alpha[i])
        else:
            grad_k[0] = grad_carried[0]
            grad_log_alpha[0] = 0.0
