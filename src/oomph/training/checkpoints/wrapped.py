"""Tensors that wrap others: torchao's optimizer state. Only the kinds listed here are made on loading."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from oomph.errors import UserError
from oomph.training.checkpoints.tensor_file import Malformed

# A name in a file must never decide what is imported; this list does.
KINDS = {
    f"torchao.optim.{module}.{name}": (f"torchao.optim.{module}", name)
    for module, name in (
        ("subclass_8bit", "OptimState8bit"),
        ("subclass_4bit", "OptimState4bit"),
        ("subclass_fp8", "OptimStateFp8"),
    )
}


def parts_of(tensor: Tensor) -> tuple[str, dict[str, Tensor], list[Any]] | None:
    """Its kind, the tensors inside and the plain rest; None when it is of no kind listed."""
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if kind not in KINDS:
        return None
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return kind, {name: getattr(tensor, name) for name in names}, list(context)


def made(kind: str, inner: dict[str, Tensor], context: Any) -> Tensor:
    if kind not in KINDS:
        raise Malformed(f"has a tensor of unknown kind {kind[:60]!r}")
    module, name = KINDS[kind]
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise UserError(
            f"the checkpoint holds optimizer state of torchao ({name}), which is not installed here; "
            "install torchao"
        ) from None
    try:
        return found.__tensor_unflatten__(inner, context, None, None)  # type: ignore[no-any-return]
    except Exception as problem:
        raise Malformed(f"has a {name} that cannot be made: {problem}") from None
