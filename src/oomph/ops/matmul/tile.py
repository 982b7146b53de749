"""The shape of a tile, and which one is taken when none is asked for."""

from dataclasses import dataclass

import torch

from oomph.errors import ArgumentError

_SIDES = (16, 32, 64, 128, 256)  # tl.dot takes powers of two from 16 on


@dataclass(frozen=True)
class Tile:
    """One program computes an m x n tile of the product, k columns of a and k rows of b at a time.

    group: how many tiles one above the other are computed before moving right (see triton.py).
    warps: 32 threads each. stages: how many steps of the loop over K have their loads under way at once.
    """

    m: int
    n: int
    k: int
    group: int = 8
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        if self.m not in _SIDES or self.n not in _SIDES or self.k not in _SIDES:
            raise ArgumentError(f"tile {self.m}x{self.n}x{self.k} is not valid; each side is one of {_SIDES}")
        if self.warps not in (1, 2, 4, 8, 16) or self.stages not in range(1, 9) or self.group < 1:
            raise ArgumentError(
                f"{self!r} is not valid; warps is 1, 2, 4, 8 or 16, stages 1 to 8, group at least 1"
            )


def resolve(tile: "Tile | int | None", dtype: torch.dtype, rows: int) -> Tile:
    """A Tile as given, a square one by its side, or the default for the dtype and the number of rows."""
    if isinstance(tile, Tile):
        return tile
    if tile is None:
        return _default(dtype, rows)
    if isinstance(tile, bool) or not isinstance(tile, int) or tile not in _SIDES:
        raise ArgumentError(f"tile={tile!r} is not valid; give a Tile or a side, one of {_SIDES}")
    # About as many outputs for each thread as keep it busy: 8 at side 16, 64 at side 128.
    return Tile(
        tile, tile, min(tile, 64), warps={16: 1, 32: 2, 64: 4}.get(tile, 8), stages=3 if tile < 256 else 2
    )


def _default(dtype: torch.dtype, rows: int) -> Tile:
    """The largest whose sums fit the registers; benchmarks/ops/matmul.py measures its neighbours."""
    if dtype == torch.float32:  # without tensor cores: registers, not bandwidth, are what runs out
        return Tile(64, 64, 16, warps=4, stages=3) if rows > 32 else Tile(16, 64, 32, warps=4, stages=3)
    if rows <= 64:  # a taller tile would be mostly edge
        return Tile(64 if rows > 16 else 16, 128, 64, warps=4, stages=4)
    return Tile(128, 256, 64, warps=8, stages=3)
