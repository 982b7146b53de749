"""What short_convolution computes, to be read. Plain differentiable torch, in float32 or wider.

Legend: B batch, T tokens, K taps, S = T + K - 1 rows given, C channels, D channels of a unit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-6


def unit_vectors(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + 1e-6) over the last dimension: of length 1, and 0 where x is 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPSILON)).to(x.dtype)


def reference(x_BSC: Tensor, weight_C1K: Tensor, unit_size: int | None) -> Tensor:
    """silu(sum over taps of weight * x) [B, T, C]; the last tap is the token's own. Rounded once."""
    wide = torch.promote_types(x_BSC.dtype, torch.float32)
    x, weight_CK = x_BSC.to(wide), weight_C1K[:, 0].to(wide)
    taps = weight_CK.shape[1]
    tokens = x.shape[1] - taps + 1
    total = x[:, :tokens] * weight_CK[:, 0]
    for tap in range(1, taps):
        total = torch.addcmul(total, x[:, tap : tap + tokens], weight_CK[:, tap])
    y_BTC = F.silu(total)
    if unit_size is not None:
        y_BTC = unit_vectors(y_BTC.unflatten(-1, (-1, unit_size))).flatten(-2)
    return y_BTC.to(x_BSC.dtype)
