"""What `nsa` computes, written with whole matrices: the specification that tests compare to.

B batch, T tokens, H key/value heads, G query heads of each (q head h * G + g reads k/v head h), D head size,
S tokens of the keys, N compressed blocks, P selectable blocks. The queries may be a chunk of the sequence,
from token `start` on; keys and compressed blocks are then those up to its end.

A token t attends, through one softmax each, to
    compression: compressed block j, if its last token j * stride + compress_block - 1 is not after t;
    selection: the tokens up to t of the blocks selected for t (and its group of heads);
    sliding window: the tokens t - window + 1 .. t.
A branch without keys gives zeros. The result is the sum of the branches, each times its gate.

Selection: the importance of block b is the sum, over the group's heads and the compressed blocks j, of the
weight that t gives to j times the number of strides that lie in both j and b (equation 9 of the NSA paper,
arXiv 2502.11089, with its sums running over j = b * block / stride + m - n). Block 0, the block of t and the
one before are always selected; then the most important, the lower index first where equal, until there are
top_n. Blocks that begin after t are never selected. The selection has no gradient.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from oomph.ops.sparse_attention.arguments import NSAConfig


def reference(
    q_BTQD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    gates_BTQ: Sequence[Tensor],
    ck_BNHD: Tensor,
    cv_BNHD: Tensor,
    config: NSAConfig,
    *,
    start: int = 0,
    chosen_BHTP: Tensor | None = None,
) -> Tensor:
    """O(T S) memory. `chosen_BHTP` (True: selected) replaces the selection, for tests."""
    B, T, heads, D = q_BTQD.shape
    H, S = k_BSHD.shape[2], k_BSHD.shape[1]
    q_BHGTD = q_BTQD.reshape(B, T, H, heads // H, D).permute(0, 2, 3, 1, 4)
    t_T1 = torch.arange(start, start + T, device=q_BTQD.device)[:, None]
    s_S = torch.arange(S, device=q_BTQD.device)

    start_N = torch.arange(ck_BNHD.shape[1], device=q_BTQD.device) * config.compress_stride
    last_N = start_N + config.compress_block - 1
    compressed_BHGTD, weights_BHGTN = _attend(q_BHGTD, ck_BNHD, cv_BNHD, last_N <= t_T1, config.scale)

    if chosen_BHTP is None:
        chosen_BHTP = select_blocks(importance(weights_BHGTN.detach(), S, config), config, start)
    visible_BHTS = chosen_BHTP[..., s_S // config.block_size] & (s_S <= t_T1)
    selected_BHGTD, _ = _attend(q_BHGTD, k_BSHD, v_BSHD, visible_BHTS[:, :, None], config.scale)

    near_TS = (s_S <= t_T1) & (s_S > t_T1 - config.window)
    first = max(0, start - config.window + 1)  # keys before it are in no window
    window = (k_BSHD[:, first:], v_BSHD[:, first:], near_TS[:, first:])
    windowed_BHGTD, _ = _attend(q_BHGTD, *window, config.scale)

    branches = (compressed_BHGTD, selected_BHGTD, windowed_BHGTD)
    out = q_BTQD.new_zeros(q_BTQD.shape)
    for gate_BTQ, branch_BHGTD in zip(gates_BTQ, branches, strict=True):
        out = out + gate_BTQ[..., None] * branch_BHGTD.permute(0, 3, 1, 2, 4).reshape(q_BTQD.shape)
    return out.to(q_BTQD.dtype)


def _attend(
    q: Tensor, k_BNHD: Tensor, v_BNHD: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The result [B, H, G, T, D] and the weights [B, H, G, T, N] of one softmax over the visible keys."""
    if k_BNHD.shape[1] == 0:
        return torch.zeros_like(q), q.new_zeros((*q.shape[:-1], 0))
    scores = torch.einsum("bhgtd,bnhd->bhgtn", q, k_BNHD) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    no_key = ~visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(no_key, 0.0), -1).masked_fill(no_key, 0.0)
    return torch.einsum("bhgtn,bnhd->bhgtd", weights, v_BNHD), weights


def importance(weights_BHGTN: Tensor, tokens: int, config: NSAConfig) -> Tensor:
    """[B, H, T, P]: the weight that a group of heads gives to the strides of each block of the tokens."""
    weights_BHTN = weights_BHGTN.sum(2)
    count, blocks = weights_BHTN.shape[-1], config.blocks(tokens)
    # A stride has the weight of all compressed blocks that cover it; a block has that of its strides.
    strides = blocks * config.strides_per_block
    size = max(strides, count + config.strides_per_compressed)
    covered = weights_BHTN.new_zeros((*weights_BHTN.shape[:-1], size))
    for shift in range(config.strides_per_compressed):
        covered[..., shift : shift + count] += weights_BHTN
    return covered[..., :strides].unflatten(-1, (blocks, config.strides_per_block)).sum(-1)


def select_blocks(importance_BHTP: Tensor, config: NSAConfig, start: int = 0) -> Tensor:
    """[B, H, T, P], True where a block is selected; the first token is `start`."""
    T, blocks = importance_BHTP.shape[-2:]
    b_P = torch.arange(blocks, device=importance_BHTP.device)
    t_T1 = torch.arange(start, start + T, device=importance_BHTP.device)[:, None]
    current_T1 = t_T1 // config.block_size
    always_TP = (b_P == 0) | (b_P == current_T1) | (b_P == current_T1 - 1)
    causal_TP = b_P <= current_T1
    rank = importance_BHTP.masked_fill(always_TP, torch.inf).masked_fill(~causal_TP, -torch.inf)
    # A stable sort keeps the lower index first where importances are equal.
    order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : config.top_n]
    chosen = torch.zeros_like(rank, dtype=torch.bool)
    return chosen.scatter_(-1, order, torch.ones_like(order, dtype=torch.bool)) & causal_TP
