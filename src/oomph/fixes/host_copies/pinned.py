"""Pinned host memory that is used again from step to step: to pin it takes longer than to copy into it."""

from __future__ import annotations

from collections import defaultdict

import torch

from oomph.units import MiB


class PinnedPool:
    """Hands out pieces whose sizes are powers of two.

    torch rounds pinned memory up to a power of two, which would cost a 640 MiB tensor 1 GiB; in pieces of
    512 and 128 MiB it costs what it has. Pieces fit tensors of other sizes later.
    """

    def __init__(self) -> None:
        self.bytes = 0  # all that it has made
        self._free: defaultdict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)

    def take(self, size: int, pinned: bool) -> list[torch.Tensor]:
        """Pieces of bytes that hold `size` together, in order."""
        return [self._piece(piece, pinned) for piece in pieces_of(size)]

    def give_back(self, pieces: list[torch.Tensor], pinned: bool) -> None:
        """`pinned` as it was asked for: to ask the driver takes time, and a prediction has none."""
        for piece in pieces:
            self._free[piece.numel(), pinned].append(piece)

    def _piece(self, size: int, pinned: bool) -> torch.Tensor:
        free = self._free[size, pinned]
        if free:
            return free.pop()
        self.bytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def pieces_of(size: int) -> list[int]:
    """Powers of two, none below 1 MiB, the largest first; together at most 1 MiB more than `size`."""
    whole = -(-size // MiB)
    return [MiB << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]
