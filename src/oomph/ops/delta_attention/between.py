"""From blocks to chunks: the products of a chunk's keys and queries, block by block, in matrix products.

Legend: P places of a block, M blocks of a chunk, C = M * P tokens of a chunk, X chunks x heads, K key size.
Inputs are [P, M, X, K]. Inside a block within.py does the work. Between blocks, a key is carried to the end
of its own block, on through the blocks after it (`carried`), and meets the rows of a later block decayed from
that block's start (`left`): factors in [0, 1] all along.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oomph.ops.delta_attention.buffers import Buffers
from oomph.ops.delta_attention.within import (
    Products,
    decayed_products,
    decayed_products_backward,
    keys_at_end,
)


@dataclass(frozen=True)
class ChunkProducts:
    """keys, queries [X, C, C], zero above their diagonals, and k_end [X, K, C]: as in within.py, of chunks.

    k_block_end [P, M, X, K]: keys at the ends of their blocks. in_block: the decay from a block's start to
    each token, itself included. before_block [M, X, K]: from the chunk's start to a block's.
    """

    keys: Tensor
    queries: Tensor
    k_end: Tensor
    k_block_end: Tensor
    in_block: Tensor
    before_block: Tensor

    def decay(self, out: Tensor) -> Tensor:
        """[P, M, X, K]: from the chunk's start to each token, itself included."""
        return torch.mul(self.in_block, self.before_block, out=out)


def by_places(x_XCd: Tensor, places: int) -> Tensor:
    """[P, M, X, d], a view"""
    return x_XCd.unflatten(1, (-1, places)).permute(2, 1, 0, 3)


def chunk_products(
    q: Tensor, k: Tensor, alpha: Tensor, buffers: Buffers, pairs: tuple[Tensor, Tensor] | None = None
) -> ChunkProducts:
    """`pairs`: keys and queries, where they have been kept."""
    blocks, in_block, before = k.shape[1], buffers.new(*k.shape), buffers.new(*k.shape[1:])
    _running_products(alpha, in_block)
    before[0] = 1.0
    for m in range(1, blocks):
        torch.mul(before[m - 1], in_block[-1, m - 1], out=before[m])
    if pairs is None:
        inside = decayed_products(q.flatten(1, 2), k.flatten(1, 2), alpha.flatten(1, 2), buffers)
        keys, queries = (_on_diagonal(x, blocks, buffers) for x in (inside.keys, inside.queries))
        buffers.free(inside.keys, inside.queries)
        k_block_end = inside.k_end.view(k.shape)
        k_end = _meet_earlier(q, k, in_block, k_block_end, buffers, (keys, queries))
    else:
        keys, queries = pairs
        k_block_end = keys_at_end(k.flatten(1, 2), alpha.flatten(1, 2), buffers).view(k.shape)
        k_end = _meet_earlier(q, k, in_block, k_block_end, buffers, None)
    return ChunkProducts(keys, queries, k_end, k_block_end, in_block, before)


def _meet_earlier(
    q: Tensor,
    k: Tensor,
    in_block: Tensor,
    k_block_end: Tensor,
    buffers: Buffers,
    into: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Carries keys from block to block to the chunk's end [X, K, C]; keys and queries get what they meet."""
    places, blocks, chunks, size = k.shape
    carried = buffers.new(chunks, size, blocks * places)
    carried.view(chunks, size, blocks, places).copy_(k_block_end.permute(2, 3, 1, 0))
    left = buffers.new(chunks, 2 * places, size)
    for m in range(1, blocks):
        here, earlier = slice(m * places, (m + 1) * places), slice(0, m * places)
        if into is not None:
            pairs = buffers.new(chunks, 2 * places, m * places)
            torch.bmm(_fill_left(left, q, k, in_block, m), carried[:, :, earlier], out=pairs)
            into[0][:, here, earlier], into[1][:, here, earlier] = pairs[:, :places], pairs[:, places:]
            buffers.free(pairs)
        carried[:, :, earlier] *= in_block[-1, m].unsqueeze(-1)
    buffers.free(left)
    return carried


def _fill_left(left: Tensor, q: Tensor, k: Tensor, in_block: Tensor, m: int) -> Tensor:
    """[X, 2 P, K]: the keys of block m, then its queries, decayed from the block's start."""
    places = k.shape[0]
    decay = in_block[:, m].transpose(0, 1)
    torch.mul(k[:, m].transpose(0, 1), decay, out=left[:, :places])
    torch.mul(q[:, m].transpose(0, 1), decay, out=left[:, places:])
    return left


def _on_diagonal(inside_PPY: Tensor, blocks: int, buffers: Buffers) -> Tensor:
    """[X, C, C] with the blocks' own products on the diagonal, zeros elsewhere."""
    places, chunks = inside_PPY.shape[0], inside_PPY.shape[2] // blocks
    whole = buffers.zeros(chunks, blocks * places, blocks * places)
    cut = whole.view(chunks, blocks, places, blocks, places)
    cut.diagonal(0, 1, 3).copy_(inside_PPY.unflatten(2, (blocks, chunks)).permute(3, 0, 1, 2))
    return whole


def _diagonal(whole_XCC: Tensor, blocks: int, buffers: Buffers) -> Tensor:
    """[P, P, Y], the reverse of _on_diagonal"""
    chunks, size = whole_XCC.shape[0], whole_XCC.shape[1] // blocks
    cut = whole_XCC.unflatten(2, (blocks, size)).unflatten(1, (blocks, size))
    out = buffers.new(size, size, blocks * chunks)
    out.view(size, size, blocks, chunks).copy_(cut.diagonal(0, 1, 3).permute(1, 2, 3, 0))
    return out


@dataclass(frozen=True)
class Grads:
    """Of q, k and log alpha, [P, M, X, K]."""

    q: Tensor
    k: Tensor
    log_alpha: Tensor


def chunk_products_backward(
    q: Tensor, k: Tensor, alpha: Tensor, made: ChunkProducts, pairs: Tensor, k_end: Tensor, buffers: Buffers
) -> Grads:
    """Gradients: pairs [X, 2 C, C] of keys, then queries, and k_end [X, C, K]; both are freed.

    What `pairs` holds above the diagonals is not read.
    """
    places, blocks, chunks, size = k.shape
    keys, queries = pairs[:, : blocks * places], pairs[:, blocks * places :]
    carried_at = _carried_at_blocks(made, buffers)
    back = k_end
    # Of the rows that meet earlier blocks, and of the decay over whole blocks; block 0 has neither.
    lefts, of_blocks = buffers.new(blocks, chunks, 2 * places, size), buffers.new(blocks, chunks, size)
    left = buffers.new(chunks, 2 * places, size)
    lefts[0], of_blocks[0] = 0.0, 0.0
    for m in reversed(range(1, blocks)):
        here, earlier = slice(m * places, (m + 1) * places), slice(0, m * places)
        carried = carried_at.pop()
        met, moved = buffers.new(chunks, 2 * places, m * places), buffers.new(*carried.shape)
        torch.cat((keys[:, here, earlier], queries[:, here, earlier]), 1, out=met)
        torch.bmm(met, carried, out=lefts[m])
        back[:, earlier] *= made.in_block[-1, m].unsqueeze(1)
        torch.sum(torch.mul(back[:, earlier], carried, out=moved), 1, out=of_blocks[m])
        _fill_left(left, q, k, made.in_block, m)
        back[:, earlier] += torch.bmm(met.transpose(1, 2), left, out=moved)
        buffers.free(met, moved, carried)
    buffers.free(left)
    back_PYK = buffers.new(*k.shape).copy_(by_places(back, places)).flatten(1, 2)
    inside = Products(_diagonal(keys, blocks, buffers), _diagonal(queries, blocks, buffers), back_PYK)
    buffers.free(pairs, k_end)
    flat = q.flatten(1, 2), k.flatten(1, 2), alpha.flatten(1, 2)
    grads = Grads(*(x.view(k.shape) for x in decayed_products_backward(*flat, inside, buffers)))
    if blocks > 1:
        by_place = lefts.permute(2, 0, 1, 3)  # [2 P, M, X, K]
        reads = back_PYK.view(k.shape)
        grad = torch.mul(by_place[:places], made.in_block, out=buffers.new(*k.shape))
        grads.k.add_(grad)
        torch.mul(grad, k, out=reads)
        torch.mul(by_place[places:], made.in_block, out=grad)
        grads.q.add_(grad)
        reads.addcmul_(grad, q)
        reads[-1] += of_blocks
        grads.log_alpha.add_(suffix_sums_(reads))
    return grads


def _carried_at_blocks(made: ChunkProducts, buffers: Buffers) -> list[Tensor]:
    """What blocks 1, 2, ... meet: all earlier keys [X, tokens, K], at the end of the block before."""
    places, blocks, chunks, size = made.k_block_end.shape
    met: list[Tensor] = []
    for m in range(1, blocks):
        here = buffers.new(chunks, m * places, size)
        if met:
            decay = made.in_block[-1, m - 1].unsqueeze(1)
            torch.mul(met[-1], decay, out=here[:, : (m - 1) * places])
        here[:, (m - 1) * places :] = made.k_block_end[:, m - 1].transpose(0, 1)
        met.append(here)
    return met


# Loops over slabs: torch's own cumprod and cumsum go along a strided dimension many times slower.


def suffix_sums_(x: Tensor) -> Tensor:
    """Along the first dimension, in place: sums over all that is not earlier."""
    for i in reversed(range(len(x) - 1)):
        x[i] += x[i + 1]
    return x


def _running_products(x: Tensor, out: Tensor) -> None:
    out[0] = x[0]
    for i in range(1, len(x)):
        torch.mul(out[i - 1], x[i], out=out[i])
