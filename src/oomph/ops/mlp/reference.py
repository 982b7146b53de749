"""What a tiled MLP computes, in three lines of plain differentiable torch."""

from torch import Tensor
from torch.nn import functional as F

from oomph.ops.mlp.weights import MLPWeights


def mlp(weights: MLPWeights, x: Tensor) -> Tensor:
    """x [..., D] -> [..., O], holding every [..., F] tensor in between, and saving them for backward."""
    up = F.linear(x, weights.up, weights.up_bias)
    if weights.gate is None:
        hidden = activate(weights.activation, up)
    else:
        hidden = activate(weights.activation, F.linear(x, weights.gate, weights.gate_bias)) * up
    return F.linear(hidden, weights.down, weights.down_bias)


def activate(activation: str, z: Tensor) -> Tensor:
    if activation == "silu":
        return F.silu(z)
    if activation == "relu":
        return F.relu(z)
    return F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
