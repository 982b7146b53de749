"""What `attention` computes, written with the whole score matrix: the specification that tests compare to.

B batch, H query heads, G key/value heads, Q and K lengths, D and E head sizes of query/key and of value.
"""

import math

import torch
from torch import Tensor

from oomph.ops.softmax_attention.arguments import BiasFunction, BlockPattern


def reference(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    *,
    causal: bool = False,
    bias: Tensor | BiasFunction | None = None,
    pattern: BlockPattern | None = None,
    key_mask_BK: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T scale + bias) v over the allowed keys; zeros where a query has none. O(Q K) memory."""
    B, H, Q, D = q_BHQD.shape
    K = k_BGKD.shape[2]
    group = H // k_BGKD.shape[1]
    k_BHKD, v_BHKE = k_BGKD.repeat_interleave(group, 1), v_BGKE.repeat_interleave(group, 1)
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    scores_BHQK = torch.einsum("bhqd,bhkd->bhqk", q_BHQD, k_BHKD) * scale

    def index(size: int, *shape: int) -> Tensor:
        return torch.arange(size, device=q_BHQD.device).view(shape)

    q_index, k_index = index(Q, 1, 1, Q, 1), index(K, 1, 1, 1, K)
    if isinstance(bias, Tensor):
        scores_BHQK = scores_BHQK + bias
    elif bias is not None:
        values = bias(index(B, B, 1, 1, 1), index(H, 1, H, 1, 1), q_index, k_index)
        scores_BHQK = scores_BHQK + values.to(scores_BHQK.dtype)

    position = q_index + (K - Q)  # the last query is at the last key
    allowed = torch.ones_like(scores_BHQK, dtype=torch.bool)
    if causal:
        allowed = allowed & (k_index <= position)
    if pattern is not None:
        q_block = torch.div(position, pattern.block, rounding_mode="floor")
        k_block = k_index // pattern.block
        in_pattern = q_block == k_block
        if pattern.kind in ("local", "mixed"):
            in_pattern = in_pattern | ((q_block - k_block).abs() <= pattern.window)
        if pattern.kind in ("global", "mixed"):
            in_pattern = in_pattern | (k_block % pattern.stride == 0)
        allowed = allowed & in_pattern
    if key_mask_BK is not None:
        allowed = allowed & key_mask_BK[:, None, None, :]

    scores_BHQK = scores_BHQK.masked_fill(~allowed, -math.inf)
    no_key = (scores_BHQK == -math.inf).all(-1, keepdim=True)
    weights_BHQK = torch.softmax(scores_BHQK.masked_fill(no_key, 0.0), -1).masked_fill(no_key, 0.0)
    return torch.einsum("bhqk,bhke->bhqe", weights_BHQK, v_BHKE).to(q_BHQD.dtype)
