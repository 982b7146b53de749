"""A linear layer whose weight changes per token by a low-rank delta, without the deltas."""

from oomph.ops.modulation.api import TokenIndex, compute_weight_delta, modulated_linear, weight_delta_norm
from oomph.ops.modulation.weights import Int8Weight, quantize_int8

__all__ = [
    "Int8Weight",
    "TokenIndex",
    "compute_weight_delta",
    "modulated_linear",
    "quantize_int8",
    "weight_delta_norm",
]
