"""Tiled MLPs: forward and backward a few thousand tokens at a time; no [tokens, hidden] tensor is saved."""

from oomph.ops.mlp.api import check_options, has_batch_norm, tiled_mlp
from oomph.ops.mlp.weights import MLPWeights, NotRecognised, is_conv1d, recognise

__all__ = [
    "MLPWeights",
    "NotRecognised",
    "check_options",
    "has_batch_norm",
    "is_conv1d",
    "recognise",
    "tiled_mlp",
]
