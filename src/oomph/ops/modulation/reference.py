"""The spec: every token t has its own weight, W + A diag(mod_t) B, and the output is h_t times it.

Since h (A diag(m) B) = ((h A) * m) B, no token's weight is ever needed.
"""

from torch import Tensor


def modulated_linear(
    h: Tensor, weight: Tensor, A: Tensor, B: Tensor, mod: Tensor, bias: Tensor | None = None
) -> Tensor:
    """h [..., d], weight [d, f], A [d, r], B [r, f], mod [..., r], bias [f] -> [..., f]; all of one dtype."""
    y = h @ weight + ((h @ A) * mod) @ B
    return y if bias is None else y + bias
