"""What `nsa` computes, written with whole matrices: the specification that tests compare to.

B batch, T tokens, H key/value heads, G query heads of each (q head h * G + g reads k/v head h), D head size,
N compressed blocks, S selectable blocks.

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

import torch
from torch import Tensor

from oomph.ops.sparse_attention.arguments import NSAConfig


def reference(
    q_BTQD: Tensor,
    k_BTHD: Tensor,
    v_BTHD: Tensor,
    gates_BTQ: tuple[Tensor, Tensor, Tensor],
    ck_BNHD: Tensor,
    cv_BNHD: Tensor,
    config: NSAConfig,
    chosen_BHTS: Tensor | None = None,
) -> Tensor:
    """O(T^2) memory. `chosen_BHTS` (True: selected) replaces the selection, for tests."""
    B, T, heads, D = q_BTQD.shape
    H = k_BTHD.shape[2]
    q_BHGTD = q_BTQD.reshape(B, T, H, heads // H, D).permute(0, 2, 3, 1, 4)
    t_T1 = torch.arange(T, device=q_BTQD.device)[:, None]
    s_T = torch.arange(T, device=q_BTQD.device)

    start_N = torch.arange(ck_BNHD.shape[1], device=q_BTQD.device) * config.compress_stride
    last_N = start_N + config.compress_block - 1
    compressed_BHGTD, weights_BHGTN = _attend(q_BHGTD, ck_BNHD, cv_BNHD, last_N <= t_T1, config.scale)

    if chosen_BHTS is None:
        chosen_BHTS = select_blocks(importance(weights_BHGTN.detach(), T, config), config)
    visible_BHTT = chosen_BHTS[..., s_T // config.block_size] & (s_T <= t_T1)
    selected_BHGTD, _ = _attend(q_BHGTD, k_BTHD, v_BTHD, visible_BHTT[:, :, None], config.scale)

    near_TT = (s_T <= t_T1) & (s_T > t_T1 - config.window)
    windowed_BHGTD, _ = _attend(q_BHGTD, k_BTHD, v_BTHD, near_TT, config.scale)

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
    """[B, H, T, S]: the weight that a group of heads gives to the strides of each block."""
    count, blocks = weights_BHGTN.shape[-1], config.blocks(tokens)
    start_N1 = torch.arange(count, device=weights_BHGTN.device)[:, None]
    start_S = torch.arange(blocks, device=weights_BHGTN.device) * config.strides_per_block
    first = torch.maximum(start_N1, start_S)
    last = torch.minimum(start_N1 + config.strides_per_compressed, start_S + config.strides_per_block)
    shared_NS = (last - first).clamp(min=0).to(weights_BHGTN.dtype)
    return torch.einsum("bhgtn,ns->bhts", weights_BHGTN, shared_NS)


def select_blocks(importance_BHTS: Tensor, config: NSAConfig) -> Tensor:
    """[B, H, T, S], True where a block is selected."""
    T, blocks = importance_BHTS.shape[-2:]
    b_S = torch.arange(blocks, device=importance_BHTS.device)
    current_T1 = (torch.arange(T, device=importance_BHTS.device) // config.block_size)[:, None]
    always_TS = (b_S == 0) | (b_S == current_T1) | (b_S == current_T1 - 1)
    causal_TS = b_S <= current_T1
    rank = importance_BHTS.masked_fill(always_TS, torch.inf).masked_fill(~causal_TS, -torch.inf)
    order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : config.top_n]
    chosen = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, order, True)
    return chosen & causal_TS
