"""In which dtype an op's products run, and how autocast is kept out of them once that is settled."""

import contextlib
from typing import Any

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or under autocast the one it asks for."""
    # Autocast leaves float64 alone, and so does this.
    if autocast_is_on(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast off for x's device; nothing at all where it is off already."""
    if not autocast_is_on(x):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def autocast_is_on(x: Tensor) -> bool:
    kind = x.device.type
    # Devices without autocast, such as meta, raise an error when asked whether it is enabled.
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
