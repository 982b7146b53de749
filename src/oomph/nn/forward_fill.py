"""The last kept row in the place of every dropped one, without a look at the mask on the host."""

import torch
from torch import Tensor


def forward_fill(x_BTX: Tensor, dropped_BT: Tensor, before_BX: Tensor | None = None) -> Tensor:
    """x [B, T, ...] with each dropped row replaced by the last row before it that is not dropped, detached.

    Rows dropped before any was kept get `before` [B, ...] (zeros unless given), detached too. A kept row is
    x's own, and its gradient does not see the rows that repeat it.
    """
    if x_BTX.shape[1] == 0:
        return x_BTX
    source = x_BTX.detach()
    first = (
        torch.zeros_like(source[:, :1]) if before_BX is None else before_BX.detach().to(x_BTX.dtype)[:, None]
    )
    numbers_T = torch.arange(x_BTX.shape[1], device=x_BTX.device)
    # The largest number of a kept row so far; -1 while there is none.
    last_BT = torch.where(dropped_BT, -1, numbers_T).cummax(dim=1).values
    batch_B1 = torch.arange(x_BTX.shape[0], device=x_BTX.device)[:, None]
    repeated = source[batch_B1, last_BT.clamp(min=0)]
    trailing = (1,) * (x_BTX.dim() - 2)
    repeated = torch.where((last_BT < 0).view(*last_BT.shape, *trailing), first, repeated)
    return torch.where(dropped_BT.view(*dropped_BT.shape, *trailing), repeated, x_BTX)
