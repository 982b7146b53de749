"""Thin modules over oomph.ops."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oomph.nn.loss import LinearCrossEntropyLoss
    from oomph.nn.mlp import GatedMLP, TiledMLP
    from oomph.nn.modulated import ModulatedLinear
    from oomph.nn.rotary import RotaryEmbedding

__all__ = ["GatedMLP", "LinearCrossEntropyLoss", "ModulatedLinear", "RotaryEmbedding", "TiledMLP"]

_HOMES = {
    "GatedMLP": "mlp",
    "LinearCrossEntropyLoss": "loss",
    "ModulatedLinear": "modulated",
    "RotaryEmbedding": "rotary",
    "TiledMLP": "mlp",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oomph.nn' has no attribute {name!r}")
    value = getattr(import_module(f"oomph.nn.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
