"""Softmax attention that never holds the score matrix: one function, several exact implementations."""

from oomph.ops.softmax_attention.api import attention
from oomph.ops.softmax_attention.arguments import BiasFunction, BlockPattern, LocalityBias, locality_bias

__all__ = ["BiasFunction", "BlockPattern", "LocalityBias", "attention", "locality_bias"]
