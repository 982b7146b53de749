"""An MLP as data: its matrices, its biases and the name of its activation.

Shapes: D features in, O features out, F hidden features. Matrices are laid out as in `nn.Linear`: [out, in].
"""

from dataclasses import dataclass

from torch import Tensor

from oomph.errors import ArgumentError
from oomph.ops import common

# What the elementwise kernels know. "gelu" is the exact one (erf), "gelu_tanh" its usual approximation.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """`down(act(up x))`, or with a gate `down(act(gate x) * (up x))`.

    up [F, D], gate [F, D] or None, down [O, F]; biases [F], [F], [O] or None.
    """

    up: Tensor
    down: Tensor
    gate: Tensor | None = None
    up_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"

    def __post_init__(self) -> None:
        common.check_one_of("activation", self.activation, ACTIVATIONS)
        named = self.named()
        common.check_floating(**named)
        if self.gate_bias is not None and self.gate is None:
            raise ArgumentError("gate_bias is given without gate")
        for name in ("up", "down"):
            if named[name].dim() != 2:
                raise ArgumentError(f"{name} has shape {tuple(named[name].shape)}; valid: a matrix [out, in]")
        hidden, out = self.up.shape[0], self.down.shape[0]
        wanted = {
            "gate": tuple(self.up.shape),
            "down": (out, hidden),
            "up_bias": (hidden,),
            "gate_bias": (hidden,),
            "down_bias": (out,),
        }
        for name, shape in wanted.items():
            if name in named and tuple(named[name].shape) != shape:
                given = tuple(named[name].shape)
                raise ArgumentError(
                    f"{name} has shape {given}; with up {tuple(self.up.shape)} it must be {shape}"
                )
        common.check_same_device(**named)

    @property
    def kind(self) -> str:
        """For people: "silu gated (SwiGLU)", "relu"."""
        if self.gate is None:
            return self.activation
        known = {"silu": " (SwiGLU)", "gelu": " (GEGLU)", "gelu_tanh": " (GEGLU)", "relu": " (ReGLU)"}
        return f"{self.activation} gated{known[self.activation]}"

    def named(self) -> dict[str, Tensor]:
        """The tensors there are, by name."""
        fields = ("up", "down", "gate", "up_bias", "gate_bias", "down_bias")
        return {name: tensor for name in fields if (tensor := getattr(self, name)) is not None}
