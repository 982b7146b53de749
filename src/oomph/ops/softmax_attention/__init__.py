"""Softmax attention that never holds the score matrix: one function, several exact implementations."""

from oomph.ops.softmax_attention.biases import BiasFunction, LocalityBias, locality_bias
from oomph.ops.softmax_attention.op import attention
from oomph.ops.softmax_attention.patterns import BlockPattern, global_, local, mixed

__all__ = [
    "BiasFunction",
    "BlockPattern",
    "LocalityBias",
    "attention",
    "global_",
    "local",
    "locality_bias",
    "mixed",
]
