"""A linear layer whose weight changes per token by a low-rank delta, without the deltas."""

from oomph.ops.modulation.delta import compute_weight_delta, weight_delta_norm
from oomph.ops.modulation.op import modulated_linear
from oomph.ops.modulation.weights import Int8Weight, quantize_int8

__all__ = ["Int8Weight", "compute_weight_delta", "modulated_linear", "quantize_int8", "weight_delta_norm"]
