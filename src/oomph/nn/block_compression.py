"""Overlapping blocks of tokens, each made into one by a small network.

Legend: B batch, T tokens, H heads, D head size, L tokens of a block, S of a stride, N blocks, U strides.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.arguments import positive


class BlockCompression(nn.Module):
    """W2 silu(W1 (block + position) + b1) + b2, with `block` [L, D] of one head as one vector of L * D.

    Shared by all heads; `position` [L, D] tells the tokens of a block apart, and starts at zero. Kept for
    backward: one copy of the tokens. Blocks overlap, and a product with whole blocks would need L / S copies:
    so W1 is applied to strides, and a block's product is the sum of those of its strides. The share of the
    position is the same for every block, and is added once.
    """

    def __init__(
        self,
        head_dim: int,
        block: int,
        stride: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(head_dim=head_dim, compress_block=block, compress_stride=stride)
        if block % stride:
            raise ArgumentError(f"compress_block={block} is not a multiple of compress_stride={stride}")
        self.block, self.stride = block, stride
        self.position = nn.Parameter(torch.empty(block, head_dim, device=device, dtype=dtype))
        self.first = nn.Linear(block * head_dim, head_dim, device=device, dtype=dtype)
        self.second = nn.Linear(head_dim, head_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Those of this module itself; its children have their own, as torch's modules do."""
        nn.init.zeros_(self.position)

    def forward(self, x_BTHD: Tensor) -> Tensor:
        """[B, N, H, D]: the blocks that begin at a multiple of the stride and lie in x entirely."""
        batch, tokens, heads, width = x_BTHD.shape
        parts = self.block // self.stride
        blocks = 0 if tokens < self.block else (tokens - self.block) // self.stride + 1
        strides = blocks + parts - 1 if blocks else 0
        used = x_BTHD[:, : strides * self.stride].reshape(batch, strides, self.stride, heads, width)
        units_BUHX = used.transpose(2, 3).reshape(batch, strides, heads, self.stride * width)
        total = self.first(self.position.flatten())
        for part, weight in enumerate(self.first.weight.chunk(parts, dim=1)):
            total = total + F.linear(units_BUHX[:, part : part + blocks], weight)
        return self.second(F.silu(total))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"block={self.block}, stride={self.stride}"
