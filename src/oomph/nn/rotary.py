"""Rotary embedding as a module: one table per step for all layers, and no buffers."""

import torch
from torch import Tensor, nn

from oomph.ops.common import check_whole
from oomph.ops.rotary_embedding import RotaryTable, rotary, rotary_table
from oomph.ops.rotary_embedding.api import rotary_dim
from oomph.ops.rotary_embedding.table import check_frequencies


class RotaryEmbedding(nn.Module):
    """One per model, not per layer: the table is made once from the positions and passed to every layer.

        rope = RotaryEmbedding(dim=128)
        table = rope(positions)              # once per forward
        q, k = rope.rotate(q, k, table)      # in each layer

    dim is the head size. There are no buffers: nothing to duplicate, to be cast by `.to(torch.bfloat16)`, to
    sit on the wrong device or to be left uninitialised when the model is built on "meta".
    """

    def __init__(
        self, dim: int, theta: float = 10000.0, *, fraction: float = 1.0, heads_first: bool = True
    ) -> None:
        super().__init__()
        check_whole(2, dim=dim)
        self.dim = dim
        self.theta = theta
        self.fraction = fraction
        self.heads_first = heads_first
        self.rotary_dim = rotary_dim(dim, fraction)
        check_frequencies(self.rotary_dim, theta)

    def forward(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> RotaryTable:
        """The table for positions [T] or [B, T], on their device; dtype float64 for a float64 model."""
        return rotary_table(positions, self.rotary_dim, theta=self.theta, dtype=dtype)

    def rotate(self, q: Tensor, k: Tensor, table: RotaryTable) -> tuple[Tensor, Tensor]:
        """q and k rotated by the table, with this module's options (see oomph.ops.rotary)."""
        rotated_q, rotated_k = rotary(q, k, table=table, fraction=self.fraction, heads_first=self.heads_first)
        return rotated_q, rotated_k

    def rotate_first(self, x: Tensor, heads: int, table: RotaryTable) -> Tensor:
        """The first `heads` heads of x rotated and the others copied: queries, keys and values in one."""
        rotated: Tensor = rotary(
            x, table=table, fraction=self.fraction, heads_first=self.heads_first, turned_heads=heads
        )
        return rotated

    def extra_repr(self) -> str:
        shown = f"dim={self.dim}, theta={self.theta}"
        return shown + (f", fraction={self.fraction}" if self.fraction != 1 else "")
