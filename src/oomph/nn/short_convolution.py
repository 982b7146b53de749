"""A depthwise causal convolution over a few tokens with SiLU, whose state can be carried on.

Legend: B batch, T tokens, C channels, K taps, N packed sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import ArgumentError
from oomph.nn.arguments import positive
from oomph.ops.short_convolution import short_convolution


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the tokens of packed sequences lie once each sequence is preceded by its K - 1 earlier tokens."""

    rows_T: Tensor
    earlier_rows: Tensor  # [N * (K - 1)]
    last_rows: Tensor  # [N * (K - 1)]
    sequences: int

    @classmethod
    def of(cls, given: Tensor | Sequence[int], x_BTC: Tensor, taps: int) -> "Packing":
        """Without looking at the values of cu_seqlens, which would wait for the device."""
        cu_seqlens = torch.as_tensor(given, device=x_BTC.device)
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
            raise ArgumentError(
                f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; valid: integers [N + 1], N >= 1"
            )
        if x_BTC.shape[0] != 1:
            raise ArgumentError(f"with cu_seqlens x has B = 1; given: x {list(x_BTC.shape)}")
        ends, before = cu_seqlens[1:].long(), taps - 1
        sequences = ends.numel()
        numbers_T = torch.arange(x_BTC.shape[1], device=ends.device)
        rows_T = numbers_T + before * (1 + torch.searchsorted(ends, numbers_T, right=True))
        counted_N = torch.arange(sequences, device=ends.device)
        offsets = torch.arange(before, device=ends.device)
        starts = cu_seqlens[:-1].long() + before * counted_N
        last = ends + before * counted_N
        return cls(
            rows_T, (starts[:, None] + offsets).flatten(), (last[:, None] + offsets).flatten(), sequences
        )


class ShortConvolution(nn.Module):
    """silu(conv(x)), row t from rows t - K + 1 .. t. The weight [C, 1, K] is that of a depthwise nn.Conv1d.

    With `unit_size`, each group of so many channels is then scaled to length 1. Kept for backward: the input.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        unit_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(channels=channels, kernel_size=kernel_size)
        self.channels, self.kernel_size, self.unit_size = channels, kernel_size, unit_size
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.kernel_size**-0.5), self.kernel_size**-0.5)  # as nn.Conv1d

    def forward(
        self, x_BTC: Tensor, earlier_BKC: Tensor | None = None, packing: Packing | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, C], the K - 1 tokens before it (zeros unless given) -> the result, the last K - 1 tokens.

        Packed (B = 1): those tokens are [N, K - 1, C], of each sequence.
        """
        before = self.kernel_size - 1
        sequences = x_BTC.shape[0] if packing is None else packing.sequences
        expected = (sequences, before, self.channels)
        if earlier_BKC is not None and tuple(earlier_BKC.shape) != expected:
            raise ArgumentError(
                f"the convolution's state has shape {list(earlier_BKC.shape)}; valid: {list(expected)}"
            )
        if packing is None:
            if earlier_BKC is None:
                joined = F.pad(x_BTC, (0, 0, before, 0))
            else:
                joined = torch.cat([earlier_BKC.to(x_BTC.dtype), x_BTC], dim=1)
            # A copy, because a view of a few rows would keep all of them alive.
            last = joined[:, joined.shape[1] - before :].clone()
            return self._convolved(joined), last
        joined = x_BTC.new_zeros(1, x_BTC.shape[1] + before * sequences, self.channels)
        joined = joined.index_copy(1, packing.rows_T, x_BTC)
        if earlier_BKC is not None:
            flat = earlier_BKC.to(x_BTC.dtype).reshape(1, before * sequences, self.channels)
            joined = joined.index_copy(1, packing.earlier_rows, flat)
        last = joined.index_select(1, packing.last_rows).view(expected)
        return self._convolved(joined).index_select(1, packing.rows_T - before), last

    def _convolved(self, joined: Tensor) -> Tensor:
        return short_convolution(joined, self.weight, unit_size=self.unit_size)

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"
