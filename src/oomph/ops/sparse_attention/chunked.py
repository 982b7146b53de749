"""The three branches in plain torch, on any device: a chunk of tokens at a time, recomputed in backward.

Saved for backward: the inputs. Beyond them and the gradients, memory holds the scores of one chunk, whose
size does not grow with the length (except for a chunk of one token, whose scores are O(T)). Time is O(T^2):
a chunk attends to all tokens before it, and those that are not selected are masked.

B batch, C tokens of the chunk, S tokens up to its end, N compressed blocks up to its end, H key/value heads,
G query heads of each, D head size, P selectable blocks up to its end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oomph.ops.common import refuse_second_derivatives
from oomph.ops.sparse_attention.arguments import NSAConfig
from oomph.units import MiB

_CPU_CHUNK, _GPU_CHUNK = 32 * MiB, 256 * MiB
_COPIES = 4  # of a chunk's scores that are alive at once in backward


class _Chunk(NamedTuple):
    """The inputs of one chunk, in the dtype of the sums."""

    q_BCQD: Tensor
    k_BSHD: Tensor
    v_BSHD: Tensor
    ck_BNHD: Tensor
    cv_BNHD: Tensor
    gate_cmp: Tensor
    gate_slc: Tensor
    gate_win: Tensor


def tokens_per_chunk(q: Tensor, config: NSAConfig) -> int:
    batch, tokens, heads, _ = q.shape
    itemsize = torch.promote_types(q.dtype, torch.float32).itemsize
    scores = 2 * tokens + config.compressed_blocks(tokens)
    budget = _CPU_CHUNK if q.device.type == "cpu" else _GPU_CHUNK
    return max(1, min(max(1, tokens), budget // max(1, batch * heads * scores * itemsize * _COPIES)))


def _chunks(q: Tensor, config: NSAConfig) -> list[tuple[int, int]]:
    tokens, step = q.shape[1], tokens_per_chunk(q, config)
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


class ChunkedSparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ck: Tensor,
        cv: Tensor,
        gate_cmp: Tensor,
        gate_slc: Tensor,
        gate_win: Tensor,
        config: NSAConfig,
    ) -> Tensor:
        inputs = (q, k, v, ck, cv, gate_cmp, gate_slc, gate_win)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for start, end in _chunks(q, config):
            out[:, start:end] = _attend(_slices(inputs, start, end, config), start, config)
        ctx.save_for_backward(*inputs)
        ctx.config = config
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        refuse_second_derivatives("nsa")
        inputs, config, wanted = ctx.saved_tensors, ctx.config, ctx.needs_input_grad[:8]
        dtype = torch.promote_types(inputs[0].dtype, torch.float32)
        sums = [
            torch.zeros_like(x, dtype=dtype) if want else None for x, want in zip(inputs, wanted, strict=True)
        ]
        for start, end in _chunks(inputs[0], config):
            chunk = _slices(inputs, start, end, config)
            leaves = _Chunk(*(x.detach().requires_grad_(want) for x, want in zip(chunk, wanted, strict=True)))
            asked = [leaf for leaf in leaves if leaf.requires_grad]
            with torch.enable_grad():
                out = _attend(leaves, start, config)
            got = iter(torch.autograd.grad(out, asked, grad[:, start:end].to(dtype), allow_unused=True))
            for place, leaf in zip(_views(sums, start, end, config), leaves, strict=True):
                gradient = next(got) if leaf.requires_grad else None
                if place is not None and gradient is not None:
                    place.add_(gradient)
        return *(None if s is None else s.to(x.dtype) for s, x in zip(sums, inputs, strict=True)), None


def _views(tensors: Sequence[Tensor | None], start: int, end: int, config: NSAConfig) -> list[Any]:
    """The chunk of q and the gates, and the keys and values up to its end; None for None."""
    q, k, v, ck, cv, *gates = tensors
    n = config.compressed_blocks(end)
    ranges = [(q, start, end), (k, 0, end), (v, 0, end), (ck, 0, n), (cv, 0, n)]
    ranges += [(gate, start, end) for gate in gates]
    return [None if x is None else x[:, lower:upper] for x, lower, upper in ranges]


def _slices(inputs: Sequence[Tensor], start: int, end: int, config: NSAConfig) -> _Chunk:
    dtype = torch.promote_types(inputs[0].dtype, torch.float32)
    return _Chunk(*(x.to(dtype) for x in _views(inputs, start, end, config)))


def _attend(chunk: _Chunk, start: int, config: NSAConfig) -> Tensor:
    """[B, C, Q, D]: the chunk's tokens are start .. start + C - 1."""
    B, C, heads, D = chunk.q_BCQD.shape
    H = chunk.k_BSHD.shape[2]
    q_BHGCD = chunk.q_BCQD.view(B, C, H, heads // H, D).permute(0, 2, 3, 1, 4) * config.scale
    device, end = q_BHGCD.device, start + C
    t_C1 = torch.arange(start, end, device=device)[:, None]

    start_N = torch.arange(chunk.ck_BNHD.shape[1], device=device) * config.compress_stride
    ends_N = start_N + config.compress_block - 1
    weights_BHGCN = _softmax(q_BHGCD, chunk.ck_BNHD, ends_N <= t_C1)
    compressed = _times(weights_BHGCN, chunk.cv_BNHD)

    selected_BHCP = _select(weights_BHGCN.detach(), start, end, config)
    s_S = torch.arange(end, device=device)
    past_CS = s_S <= t_C1
    visible_BHCS = selected_BHCP.repeat_interleave(config.block_size, -1)[..., :end] & past_CS
    selected = _times(_softmax(q_BHGCD, chunk.k_BSHD, visible_BHCS[:, :, None]), chunk.v_BSHD)

    near = max(0, start - config.window + 1)
    near_CS = (past_CS & (s_S > t_C1 - config.window))[:, near:]
    windowed = _times(_softmax(q_BHGCD, chunk.k_BSHD[:, near:], near_CS), chunk.v_BSHD[:, near:])

    out = compressed * chunk.gate_cmp[..., None]
    out = out + selected * chunk.gate_slc[..., None]
    return out + windowed * chunk.gate_win[..., None]


def _softmax(q_BHGCD: Tensor, k_BSHD: Tensor, visible: Tensor) -> Tensor:
    """Weights [B, H, G, C, S]; zeros for a token without keys."""
    scores = q_BHGCD @ k_BSHD.permute(0, 2, 3, 1)[:, :, None]
    if scores.shape[-1] == 0:
        return scores
    # The lowest finite number, not -inf: a row of those has equal weights, which the second mask clears.
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~visible, 0.0)


def _times(weights_BHGCS: Tensor, v_BSHD: Tensor) -> Tensor:
    B, H, G, C, _ = weights_BHGCS.shape
    out = weights_BHGCS @ v_BSHD.permute(0, 2, 1, 3)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).reshape(B, C, H * G, v_BSHD.shape[3])


def _select(weights_BHGCN: Tensor, start: int, end: int, config: NSAConfig) -> Tensor:
    """[B, H, C, P]: True for the blocks that a token's group of heads selects."""
    device, blocks = weights_BHGCN.device, config.blocks(end)
    group_BHCN = weights_BHGCN.sum(2)
    # A stride has the weight of all compressed blocks that cover it; a block has that of its strides.
    strides = blocks * config.strides_per_block
    covered = group_BHCN.new_zeros(
        (*group_BHCN.shape[:-1], max(strides, group_BHCN.shape[-1] + config.strides_per_compressed))
    )
    for shift in range(config.strides_per_compressed):
        covered[..., shift : shift + group_BHCN.shape[-1]] += group_BHCN
    importance_BHCP = covered[..., :strides].unflatten(-1, (blocks, config.strides_per_block)).sum(-1)
    own_C1 = torch.arange(start, end, device=device)[:, None] // config.block_size
    block_P = torch.arange(blocks, device=device)
    forced = (block_P == 0) | (block_P >= own_C1 - 1)
    allowed = block_P <= own_C1
    importance_BHCP = importance_BHCP.masked_fill(forced, torch.inf).masked_fill(~allowed, -1.0)
    # A stable sort keeps the lower index first where importances are equal.
    order = importance_BHCP.sort(dim=-1, descending=True, stable=True).indices[..., : config.top_n]
    chosen = torch.zeros_like(importance_BHCP, dtype=torch.bool)
    return chosen.scatter_(-1, order, torch.ones_like(order, dtype=torch.bool)) & allowed
