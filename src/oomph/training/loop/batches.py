"""Batches between the host and the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oomph.training.config import Stage


def moved(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """On the device; the copy goes on while the host prepares the next."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def counted_tokens(batch: Mapping[str, Any]) -> int:
    """Tokens of text, or images."""
    ids = batch.get("input_ids")
    return int(ids.numel()) if ids is not None else len(batch["images"])


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The part of the curriculum that the step after so many belongs to."""
    left = step
    for stage in stages:
        if stage.steps is None or left < stage.steps:
            return stage
        left -= stage.steps
    return stages[-1]


def at_most(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """The next ones; fewer where the data end."""
    for _ in range(count):
        try:
            yield next(batches)
        except StopIteration:
            return
