"""Tiled MLPs: forward and backward a few thousand tokens at a time; no [tokens, hidden] tensor is saved."""

from oomph.ops.mlp.api import check_options, has_batch_norm, tiled_mlp
from oomph.ops.mlp.weights import MLPWeights, NotRecognised, recognise

__all__ = ["MLPWeights", "NotRecognised", "check_options", "has_batch_norm", "recognise", "tiled_mlp"]
