"""Checks that several ops make of their arguments. A failure is one line: what was given, what is valid."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oomph.errors import ArgumentError
from oomph.units import parse_bytes

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def one_of(name: str, given: object, valid: Sequence[object]) -> None:
    if given not in valid:
        raise ArgumentError(f"{name}={given!r} is not valid; choose from {', '.join(map(repr, valid))}")


def floating_if_given(**tensors: Tensor | None) -> None:
    floating(**{name: tensor for name, tensor in tensors.items() if tensor is not None})


def floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            given = "None" if tensor is None else f"a {type(tensor).__name__}"
            raise ArgumentError(f"{name} is {given}, not a tensor; valid: a tensor of floats")
        if tensor.dtype not in FLOATS:
            raise ArgumentError(
                f"{name} has dtype {tensor.dtype}; valid: float16, bfloat16, float32, float64"
            )


def same_device(**tensors: Tensor | None) -> None:
    if len({tensor.device for tensor in tensors.values() if tensor is not None}) > 1:
        places = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
        given = ", ".join(f"{name} on {device}" for name, device in places.items())
        raise ArgumentError(f"all tensors must be on one device; given: {given}")


def same_dtype(**tensors: Tensor | None) -> None:
    if len({tensor.dtype for tensor in tensors.values() if tensor is not None}) > 1:
        dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
        given = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ArgumentError(f"all tensors must have one dtype (or run under autocast); given: {given}")


def budget(memory_budget: str | int | None) -> int | None:
    """The bytes of a `memory_budget`: None, a number of bytes, or a size such as "256MiB"."""
    if memory_budget is None:
        return None
    try:
        return parse_bytes(memory_budget)
    except ArgumentError as error:
        raise ArgumentError(f"memory_budget={memory_budget!r}: {error}; or a number of bytes") from None
