"""Memory-efficient operations: pure functions, exact gradients, the implementation chosen by `impl=`.

`explain(op, ...)` tells which implementation a call would run, and why.
"""

from typing import TYPE_CHECKING

from oomph import _attach

if TYPE_CHECKING:
    from oomph.ops.common import Choice as Choice, explain as explain
    from oomph.ops.cross_entropy import (
        compute_loss_chunked as compute_loss_chunked,
        linear_cross_entropy as linear_cross_entropy,
    )
    from oomph.ops.delta_attention import kda as kda, precompute_updates as precompute_updates
    from oomph.ops.mlp import MLPWeights as MLPWeights, tiled_mlp as tiled_mlp
    from oomph.ops.modulation import (
        Int8Weight as Int8Weight,
        compute_weight_delta as compute_weight_delta,
        modulated_linear as modulated_linear,
        quantize_int8 as quantize_int8,
        weight_delta_norm as weight_delta_norm,
    )
    from oomph.ops.rotary_embedding import (
        RotaryTable as RotaryTable,
        rotary as rotary,
        rotary_table as rotary_table,
    )
    from oomph.ops.softmax_attention import (
        BlockPattern as BlockPattern,
        attention as attention,
        locality_bias as locality_bias,
    )
    from oomph.ops.sparse_attention import nsa as nsa
    from oomph.ops.spiking import lif_gate as lif_gate
    from oomph.ops.state_space import selective_scan as selective_scan


# Each op is imported when first asked for: a program that wants one does not wait for the others.
__getattr__, __dir__, __all__ = _attach(
    __name__,
    {
        "common": ("Choice", "explain"),
        "cross_entropy": ("compute_loss_chunked", "linear_cross_entropy"),
        "delta_attention": ("kda", "precompute_updates"),
        "mlp": ("MLPWeights", "tiled_mlp"),
        "modulation": (
            "Int8Weight",
            "compute_weight_delta",
            "modulated_linear",
            "quantize_int8",
            "weight_delta_norm",
        ),
        "rotary_embedding": ("RotaryTable", "rotary", "rotary_table"),
        "softmax_attention": ("BlockPattern", "attention", "locality_bias"),
        "sparse_attention": ("nsa",),
        "spiking": ("lif_gate",),
        "state_space": ("selective_scan",),
    },
)
