"""Memory-efficient operations: pure functions, exact gradients, the implementation chosen by `impl=`.

`explain(op, ...)` tells which implementation a call would run, and why.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph.ops.choice import Choice, explain
    from oomph.ops.cross_entropy import compute_loss_chunked, linear_cross_entropy
    from oomph.ops.matmul import tiled_matmul
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
    "linear_cross_entropy",
    "locality_bias",
    "modulated_linear",
    "quantize_int8",
    "rotary",
    "rotary_table",
    "tiled_matmul",
    "tiled_mlp",
    "weight_delta_norm",
]

# Each op is imported when first asked for: a program that wants one does not wait for the others.
_HOMES = {
    "BlockPattern": "softmax_attention",
    "Choice": "choice",
    "Int8Weight": "modulation",
    "MLPWeights": "mlp",
    "RotaryTable": "rotary_embedding",
    "attention": "softmax_attention",
    "compute_loss_chunked": "cross_entropy",
    "compute_weight_delta": "modulation",
    "explain": "choice",
    "linear_cross_entropy": "cross_entropy",
    "locality_bias": "softmax_attention",
    "modulated_linear": "modulation",
    "quantize_int8": "modulation",
    "rotary": "rotary_embedding",
    "rotary_table": "rotary_embedding",
    "tiled_matmul": "matmul",
    "tiled_mlp": "mlp",
    "weight_delta_norm": "modulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oomph.ops' has no attribute {name!r}")
    value = getattr(import_module(f"oomph.ops.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
