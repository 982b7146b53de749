"""A matrix product in tiles, to learn from, with row statistics taken on the way."""

from oomph.ops.matmul.op import tiled_matmul
from oomph.ops.matmul.tile import Tile

__all__ = ["Tile", "tiled_matmul"]
