"""Softmax attention that never holds the score matrix: one function, several exact implementations."""

from oomph.ops.softmax_attention.api import attention
from oomph.ops.softmax_attention.arguments import (
    BiasFunction,
    BlockPattern,
    LocalityBias,
    global_,
    local,
    locality_bias,
    mixed,
)

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
