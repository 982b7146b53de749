"""The work inside short blocks of tokens, for all blocks of a segment at once, without large exponentials.

Legend: P tokens of a block, Y blocks x heads, K the key size. A tensor is [P, Y, K]: one token of every block
is one contiguous slab, and a step of the loops below is one operation on slabs.

With D_ij = alpha_{j+1} ... alpha_i (per channel; 1 for i = j) the products of a block are
    keys_ij    = sum_d k_i k_j D_ij     for j < i
    queries_ij = sum_d q_i k_j D_ij     for j <= i
    k_end_j    = k_j D_{P-1, j}
The keys are carried along the block and multiplied by alpha_i at token i: `carried` then holds k_j D_ij.
Every factor is in [0, 1], so nothing can overflow, and a decay so strong that alpha rounds to 0 is a factor
of 0. The usual form, exp(g_i - g_j) with g the running sum of log alpha, loses digits where g is large.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.delta_attention.buffers import Buffers

# Of the carried keys that backward keeps at a time. Less means more and shorter operations.
KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
class Products:
    """keys, queries [P, P, Y] (row, column, block), zero above their diagonals; k_end [P, Y, K]."""

    keys: Tensor
    queries: Tensor
    k_end: Tensor


def decayed_products(q: Tensor, k: Tensor, alpha: Tensor, buffers: Buffers) -> Products:
    length, blocks, _ = k.shape
    keys, queries = (buffers.zeros(length, length, blocks) for _ in range(2))
    carried, product = buffers.new(*k.shape), buffers.new(*k.shape)
    for i in range(length):
        if i:
            carried[:i].mul_(alpha[i])
            torch.sum(torch.mul(carried[:i], k[i], out=product[:i]), -1, out=keys[i, :i])
        carried[i] = k[i]
        torch.sum(torch.mul(carried[: i + 1], q[i], out=product[: i + 1]), -1, out=queries[i, : i + 1])
    buffers.free(product)
    return Products(keys, queries, carried)


def keys_at_end(k: Tensor, alpha: Tensor, buffers: Buffers) -> Tensor:
    """k_end alone"""
    k_end, decay = buffers.new(*k.shape), buffers.new(*k.shape[1:])
    k_end[-1], decay[:] = k[-1], alpha[-1]
    for j in reversed(range(k.shape[0] - 1)):
        torch.mul(k[j], decay, out=k_end[j])
        decay.mul_(alpha[j])
    buffers.free(decay)
    return k_end


def decayed_products_backward(
    q: Tensor, k: Tensor, alpha: Tensor, grad: Products, buffers: Buffers
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and log alpha. grad.k_end is overwritten.

    That of log alpha_i is a sum over the pairs which alpha_i stands between, and of nothing else: the shorter
    way, a difference of running sums over all pairs, would cancel to noise where the decay is strong.
    """
    grads = tuple(buffers.new(*k.shape) for _ in range(3))
    length, blocks, channels = k.shape
    step = min(blocks, max(1, KEPT_BYTES // max(1, kept_per_block(length, channels, k.dtype))))
    rows = [buffers.new(i + 1, step, channels) for i in range(1, length)]
    product = buffers.new(length, step, channels)
    for start in range(0, blocks, step):
        part = slice(start, min(start + step, blocks))
        count = part.stop - start
        some = Products(grad.keys[:, :, part], grad.queries[:, :, part], grad.k_end[:, part])
        given = q[:, part], k[:, part], alpha[:, part]
        into = tuple(x[:, part] for x in grads)
        _backward_of_some(*given, some, into, [row[:, :count] for row in rows], product[:, :count])
    buffers.free(product, *rows)
    return grads  # type: ignore[return-value]


def kept_per_block(length: int, channels: int, dtype: torch.dtype) -> int:
    return length * (length + 1) // 2 * channels * dtype.itemsize


def _backward_of_some(
    q: Tensor,
    k: Tensor,
    alpha: Tensor,
    grad: Products,
    into: tuple[Tensor, ...],
    room: list[Tensor],
    product: Tensor,
) -> None:
    grad_q, grad_k, grad_log_alpha = into
    rows = [k[:1], *room]  # rows[i] is `carried` at token i
    for i in range(1, k.shape[0]):
        torch.mul(rows[i - 1], alpha[i], out=rows[i][:i])
        rows[i][i] = k[i]
    back = grad.k_end  # the gradient of what is carried, from the last token back
    for i in reversed(range(k.shape[0])):
        row, here = rows[i], slice(0, i + 1)
        to_keys, to_queries = grad.keys[i, :i, :, None], grad.queries[i, here, :, None]
        back[here].addcmul_(to_queries, q[i])
        torch.sum(torch.mul(to_queries, row, out=product[here]), 0, out=grad_q[i])
        if i:
            back[:i].addcmul_(to_keys, k[i])
            torch.sum(torch.mul(to_keys, row[:i], out=product[:i]), 0, out=grad_k[i])
            grad_k[i] += back[i]
            torch.sum(torch.mul(back[:i], row[:i], out=product[:i]), 0, out=grad_log_alpha[i])
            back[:i].mul_(alpha[i])
        else:
            grad_k[0] = back[0]
            grad_log_alpha[0] = 0.0
