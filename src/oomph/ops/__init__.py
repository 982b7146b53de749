"""Memory-efficient operations: pure functions, exact gradients, the implementation chosen by `impl=`.

`explain(op, ...)` tells which implementation a call would run, and why.
"""

from oomph.ops.common import Choice, explain
from oomph.ops.cross_entropy import compute_loss_chunked, linear_cross_entropy
from oomph.ops.delta_attention import kda, precompute_updates
from oomph.ops.mlp import MLPWeights, tiled_mlp
from oomph.ops.modulation import (
    Int8Weight,
    compute_weight_delta,
    modulated_linear,
    quantize_int8,
    weight_delta_norm,
)
from oomph.ops.rotary_embedding import RotaryTable, rotary, rotary_table
from oomph.ops.softmax_attention import BlockPattern, attention, locality_bias
from oomph.ops.sparse_attention import nsa
from oomph.ops.spiking import lif_gate
from oomph.ops.state_space import selective_scan

__all__ = [
    "BlockPattern",
    "Choice",
    "Int8Weight",
    "MLPWeights",
    "RotaryTable",
    "attention",
    "compute_loss_chunked",
    "compute_weight_delta",
    "explain",
    "kda",
    "lif_gate",
    "linear_cross_entropy",
    "locality_bias",
    "modulated_linear",
    "nsa",
    "precompute_updates",
    "quantize_int8",
    "rotary",
    "rotary_table",
    "selective_scan",
    "tiled_mlp",
    "weight_delta_norm",
]
