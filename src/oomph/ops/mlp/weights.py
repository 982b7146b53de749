"""An MLP as data: its matrices, its biases, its activation; and which modules are such an MLP.

Shapes: D features in, O features out, F hidden features. Matrices have the layout of `nn.Linear`: [out, in].
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oomph import torch_internals
from oomph.errors import ArgumentError
from oomph.ops import common
from oomph.ops.common import is_fake
from oomph.torch_internals import MODULE_HOOKS

# "gelu" is the exact one (erf), "gelu_tanh" its usual approximation.
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
        why = f", to match up {list(self.up.shape)}"
        common.check_shape(self.up.shape, why, gate=self.gate)
        common.check_shape((out, hidden), why, down=self.down)
        common.check_shape((hidden,), why, up_bias=self.up_bias, gate_bias=self.gate_bias)
        common.check_shape((out,), why, down_bias=self.down_bias)
        common.check_same_device(**named)

    @property
    def kind(self) -> str:
        """For messages: "silu gated (SwiGLU)", "relu"."""
        if self.gate is None:
            return self.activation
        names = {"silu": " (SwiGLU)", "gelu": " (GEGLU)", "gelu_tanh": " (GEGLU)", "relu": " (ReGLU)"}
        return f"{self.activation} gated{names[self.activation]}"

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.up, self.down, self.gate, self.up_bias, self.gate_bias, self.down_bias)

    def named(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        names = ("up", "down", "gate", "up_bias", "gate_bias", "down_bias")
        return common.not_none(**dict(zip(names, self.tensors, strict=True)))


def mlp_reference(weights: MLPWeights, x: Tensor) -> Tensor:
    """x [..., D] -> [..., O] in plain differentiable torch; autograd saves every [..., F] tensor."""
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


# Modules ---------------------------------------------------------------------------------------------

_PLAIN_VALUES = (bool, int, float, str, FunctionType, BuiltinFunctionType)


class NotRecognised(Exception):
    """Why a module's forward is called instead of being computed from its weights."""


def recognise(module: nn.Module) -> MLPWeights:
    """The weights of a module that computes `down(act(up x))` or `down(act(gate x) * up x)`.

    Raises NotRecognised for all others. A candidate holds two or three linear layers and no other tensors.
    Attribute names prove nothing: the MLPs of Falcon-H1, Gemma 3n and DeepSeek-V4 have Llama's names, and
    scale, drop or clamp hidden features. So the class's forward runs once, with small random float64 weights
    in place of its own: the module is an MLP if the result is the formula's. The weights returned are the
    module's at this moment.
    """
    layers = _linear_layers(module)
    # By the last layer, not by the module: a copy of the module's attributes shares its result.
    cache = _formulas.setdefault(layers[-1], {})
    key = tuple(
        (type(inner), *(item for item in vars(inner).items() if isinstance(item[1], _PLAIN_VALUES)))
        for inner in module.modules()
    )
    if key not in cache:
        # Without modes that trace, predict or replace operations: the check is no part of the program.
        no_modes = torch_internals.disable_torch_function(), torch_internals.disable_dispatch_modes()
        with no_modes[0], no_modes[1], torch.no_grad(), torch.random.fork_rng(devices=()):
            cache[key] = _find_formula(module, layers)
    if cache[key] is None:
        raise NotRecognised(
            f"{type(module).__name__} does not compute down(act(up x)) or down(act(gate x) * up x)"
        )
    order, activation = cache[key]
    return _as_weights([layers[index] for index in order], activation)


# Per last linear layer and state of the module: which layer is up, down (and gate), and the activation.
_formulas: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _linear_layers(module: nn.Module) -> list[Any]:
    """The linear layers, if the module may be an MLP at all."""
    if any(getattr(nn.modules.module, "_global" + hooks, None) for hooks in MODULE_HOOKS):
        raise NotRecognised("there are hooks on all modules")
    layers = []
    for name, inner in module.named_modules():
        if "forward" in vars(inner) or (inner is not module and any(getattr(inner, h) for h in MODULE_HOOKS)):
            raise NotRecognised(f"{name or 'the module'} has hooks or a forward on the instance")
        tensors = [*inner.parameters(recurse=False), *inner.buffers(recurse=False)]
        if tensors and type(inner) is not nn.Linear and not is_conv1d(inner):
            raise NotRecognised(f"{name or 'the module'} is a {type(inner).__name__} with tensors of its own")
        for tensor in tensors:
            # A DTensor, a quantized tensor and the like have matrix products of their own.
            if type(tensor) not in (Tensor, nn.Parameter) and not is_fake(tensor):
                raise NotRecognised(f"{name} holds a {type(tensor).__name__}")
        if tensors:
            layers.append(inner)
    if len(layers) not in (2, 3):
        raise NotRecognised(f"{type(module).__name__} has {len(layers)} linear layers, not 2 or 3")
    return layers


class _SmallLinear(nn.Module):
    """Plain tensors, not parameters: nothing that watches parameters, such as a prediction, sees them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def _find_formula(module: nn.Module, layers: Sequence[Any]) -> tuple[tuple[int, ...], str] | None:
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    # Square matrices, so that one run serves whichever layer is up, down or gate.
    small = [_SmallLinear(random(5, 5), None if layer.bias is None else random(5)) for layer in layers]
    # Tokens of many magnitudes, so that a clamp shows.
    x = random(2, 4, 5) * torch.tensor([0.1, 1.0, 30.0, 1000.0], dtype=torch.float64, device="cpu")[:, None]
    try:
        replaced = dict(zip(layers, small, strict=True))
        given = x.clone()
        result = type(module).forward(_copy_with(module, replaced), given)
    except Exception:
        return None  # it takes other arguments, or depends on its sizes
    if not torch.equal(given, x):  # it is to change its argument
        return None
    if not isinstance(result, Tensor) or (result.shape, result.dtype) != (x.shape, x.dtype):
        return None
    for order in itertools.permutations(range(len(layers))):
        for activation in ACTIVATIONS:
            expected = mlp_reference(_as_weights([small[index] for index in order], activation), x)
            if torch.allclose(result, expected, rtol=1e-10, atol=1e-10):
                return order, activation
    return None


def _copy_with(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> Any:
    """A copy of the module without tensors: its linear layers are replaced, and it has no hooks."""
    if module in replaced:
        return replaced[module]
    copied = object.__new__(type(module))  # not copy.copy: FSDP2's classes do not support it
    copied.__dict__ = dict(vars(module))
    copied.__dict__["_modules"] = {
        name: None if inner is None else _copy_with(inner, replaced)
        for name, inner in module._modules.items()
    }
    return copied


def _as_weights(layers: Sequence[Any], activation: str) -> MLPWeights:
    """From up, down and perhaps gate."""
    matrices = [layer.weight.t() if is_conv1d(layer) else layer.weight for layer in layers]
    names = ("up", "down", "gate")[: len(layers)]
    biases = {f"{name}_bias": layer.bias for name, layer in zip(names, layers, strict=True)}
    return MLPWeights(**dict(zip(names, matrices, strict=True)), **biases, activation=activation)


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, whose weight is [in, out]. By name: programs copy transformers' class."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ != "Conv1D" or not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    return weight.shape[1] == getattr(module, "nf", None)
