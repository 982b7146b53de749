"""A workload's batch as fixes look at it and change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from oomph.errors import UserError
from oomph.workload import Workload

_DEVICES = ("meta", "cpu")  # a factory that needs data has it on the second


def batch_of(workload: Workload) -> Any | None:
    """A batch of the workload, without data where its factory allows that; None where it cannot be made."""
    for device in _DEVICES:
        try:
            with torch.random.fork_rng(devices=()):
                return workload.make_batch(torch.device(device))
        except Exception:  # the factory is the user's: it may fail on a device it does not know
            continue
    return None


def tensors_of(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Changed:
    """Makes a batch, then changes every tensor of it."""

    make: Callable[..., Any]
    change: Callable[[torch.Tensor, Any], torch.Tensor]  # a tensor of the batch, and the batch

    def __call__(self, device: torch.device, **sizes: int) -> Any:
        batch = self.make(device, **sizes)
        return tree_map(
            lambda leaf: self.change(leaf, batch) if isinstance(leaf, torch.Tensor) else leaf, batch
        )


def size_named(workload: Workload, wanted: str | None, usual: tuple[str, ...], fix: str) -> str | None:
    """The name among the workload's sizes: the one asked for, or a usual one; None where there is none."""
    sizes: Mapping[str, int] = workload.sizes or {}
    if wanted is not None:
        if wanted not in sizes:
            valid = f"the workload's sizes are {', '.join(sizes)}" if sizes else "the workload has no sizes"
            raise UserError(f"fix {fix!r}: there is no size {wanted!r}; {valid}")
        return wanted
    return next((name for name in sizes if name.lower() in usual), None)


def check_smaller(value: Any, now: int, fix: str) -> int:
    """The new size: what is given, or half."""
    if value is None:
        value = now // 2
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < now:
        raise UserError(f"fix {fix!r}: value={value!r} is not valid; it is {now} now, so give 1 to {now - 1}")
    return value
