"""Which modules are MLPs that can be computed without their forward: those proved to be, and no others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from oomph.ops.mlp.forward_source import Call, Expression, Function, Input, Product, expression_of
from oomph.ops.mlp.weights import MLPWeights

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Activations of transformers, by name because it may not be installed: each computes one of ours.
_TRANSFORMERS_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "SiLUActivation": "silu",
}


class NotRecognised(Exception):
    """Why a module is computed by calling it, in a few words."""


@dataclass(frozen=True)
class _Matrix:
    """weight x + bias."""

    weight: Tensor
    bias: Tensor | None
    argument: "_Meaning"


@dataclass(frozen=True)
class _Activation:
    name: str
    argument: "_Meaning"


@dataclass(frozen=True)
class _Times:
    left: "_Meaning"
    right: "_Meaning"


_Meaning = Input | _Matrix | _Activation | _Times


def recognise(module: nn.Module) -> MLPWeights:
    """The weights of a module whose forward is `down(act(up x))` or `down(act(gate x) * up x)`.

    Raises NotRecognised, with the reason, for everything else. Weights are those the module holds now.
    """
    if any(getattr(nn.modules.module, "_global" + hooks, None) for hooks in _HOOKS):
        raise NotRecognised("there are hooks on all modules")
    if "forward" in vars(module):
        raise NotRecognised("its forward was replaced on the instance")
    forward = type(module).forward
    if forward is nn.Sequential.forward:
        expression: Expression | None = Input()
        # Not named_children(), which leaves out a module's second place (one activation used twice).
        for name in module._modules:
            expression = Call(name, expression)  # type: ignore[arg-type]
    else:
        expression = expression_of(forward)
    if expression is None:
        raise NotRecognised(f"the forward of {type(module).__name__} is not a plain MLP's")
    return _as_mlp(_meaning(module, expression), type(module).__name__)


def _as_mlp(meaning: _Meaning, name: str) -> MLPWeights:
    match meaning:
        case _Matrix(down, down_bias, _Activation(activation, _Matrix(up, up_bias, Input()))):
            weights = {"up": up, "up_bias": up_bias}
        case _Matrix(
            down,
            down_bias,
            _Times(_Activation(activation, _Matrix(gate, gate_bias, Input())), _Matrix(up, up_bias, Input()))
            | _Times(
                _Matrix(up, up_bias, Input()), _Activation(activation, _Matrix(gate, gate_bias, Input()))
            ),
        ):
            weights = {"up": up, "up_bias": up_bias, "gate": gate, "gate_bias": gate_bias}
        case _:
            raise NotRecognised(f"the forward of {name} is not down(act(up x)) or down(act(gate x) * up x)")
    return MLPWeights(down=down, down_bias=down_bias, activation=activation, **weights)  # type: ignore[arg-type]


def _meaning(module: nn.Module, expression: Expression) -> _Meaning:
    match expression:
        case Product(left, right):
            return _Times(_meaning(module, left), _meaning(module, right))
        case Function(function, keywords, argument):
            return _Activation(_of_function(function, dict(keywords)), _meaning(module, argument))
        case Call(path, argument):
            return _of_call(_attribute(module, path), path, _meaning(module, argument))
    return expression


def _attribute(module: nn.Module, path: str) -> Any:
    target: Any = module
    for name in path.split("."):
        target = getattr(target, name, None)
    return target


def _of_call(target: Any, path: str, argument: _Meaning) -> _Meaning:
    if not isinstance(target, nn.Module):
        return _Activation(_of_function(target, {}), argument)
    if "forward" in vars(target) or any(getattr(target, hooks) for hooks in _HOOKS):
        raise NotRecognised(f"{path} has hooks or a forward of its own")
    transposed = _is(target, "transformers.pytorch_utils", "Conv1D")
    if type(target) is nn.Linear or transposed:
        weight, bias = _plain(path, target.weight), _plain(path, target.bias)
        return _Matrix(weight.t() if transposed else weight, bias, argument)
    if type(target) is nn.Identity:
        return argument
    if type(target) is nn.Dropout:
        if target.training and target.p > 0:
            raise NotRecognised(f"dropout {path} is active")
        return argument
    return _Activation(_of_module(target, path), argument)


def _of_module(module: nn.Module, path: str) -> str:
    if type(module) is nn.SiLU:
        return "silu"
    if type(module) is nn.ReLU:
        return "relu"
    if type(module) is nn.GELU:
        return "gelu_tanh" if module.approximate == "tanh" else "gelu"
    for name, activation in _TRANSFORMERS_ACTIVATIONS.items():
        if _is(module, "transformers.activations", name):
            return activation
    raise NotRecognised(f"{path} is a {type(module).__name__}, which has no kernel here")


def _of_function(function: Callable[..., Any] | None, keywords: dict[str, Any]) -> str:
    if function is F.silu and not keywords:
        return "silu"
    if (function is F.relu or function is torch.relu) and not keywords:
        return "relu"
    if function is F.gelu and keywords.keys() <= {"approximate"}:
        return "gelu_tanh" if keywords.get("approximate") == "tanh" else "gelu"
    raise NotRecognised(f"{getattr(function, '__name__', function)!r} is not a known activation")


def _is(module: nn.Module, package: str, name: str) -> bool:
    return type(module).__module__ == package and type(module).__name__ == name


def _plain(path: str, tensor: Any) -> Any:
    """The tensor (or None), unless it is a DTensor, quantised or such: those have products of their own."""
    if tensor is not None and type(tensor) not in (Tensor, nn.Parameter, FakeTensor):
        raise NotRecognised(f"{path} holds a {type(tensor).__name__}")
    return tensor


def trained_by(function: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors a plain function can be seen to train: in its closure, defaults, globals, `self`."""
    for value in _reachable(function):
        if isinstance(value, nn.Module):
            yield from (each for each in value.parameters() if each.requires_grad)
        elif isinstance(value, Tensor):
            if value.requires_grad:
                yield value
        elif depth and callable(value) and not isinstance(value, type):
            yield from trained_by(value, depth - 1)


def _reachable(function: Any) -> Iterator[Any]:
    yield getattr(function, "__self__", None)  # of a bound method
    inner = getattr(function, "__func__", function)
    for part in ("func", "args", "keywords"):  # of a functools.partial
        held = getattr(inner, part, None)
        yield from held.values() if isinstance(held, dict) else held if isinstance(held, tuple) else [held]
    for cell in getattr(inner, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    yield from getattr(inner, "__defaults__", None) or ()
    yield from (getattr(inner, "__kwdefaults__", None) or {}).values()
    code, outside = getattr(inner, "__code__", None), getattr(inner, "__globals__", {})
    for name in code.co_names if code is not None else ():
        value = outside.get(name)
        if isinstance(value, nn.Module | Tensor):
            yield value
