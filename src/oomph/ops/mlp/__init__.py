"""Tiled MLPs: forward and backward a few thousand tokens at a time, so no [tokens, hidden] tensor is kept."""

from oomph.ops.mlp.tiled import tiled_mlp
from oomph.ops.mlp.weights import MLPWeights

__all__ = ["MLPWeights", "tiled_mlp"]
