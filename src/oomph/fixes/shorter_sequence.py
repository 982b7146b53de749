"""Fewer tokens in a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oomph.errors import UserError
from oomph.fixes.batches import Changed, batch_of, check_smaller, size_named, tensors_of
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload

_USUAL = (
    "t l s seq seq_len seq_length seqlen sequence sequence_length length context context_length block_size "
    "tokens max_length"
).split()


class ShorterSequence(Fix):
    name = "shorter_sequence"
    kind = "training"
    changes = "Sequences are cut: the model sees fewer tokens a step, and no dependence longer than they are."

    def targets(self, context: FixContext) -> Iterable[Target]:
        _, now = _length(context.workload, None)
        if now is not None and now >= 16:
            yield Target(("batch",), {"value": now // 2}, f"{now // 2} tokens instead of {now}")

    def change_workload(
        self, workload: Workload, *_: Any, size: str | None = None, value: int | None = None
    ) -> Workload:
        """`size`: which of the workload's sizes is the length; `value`: what it is to be, by default half."""
        name, now = _length(workload, size)
        if now is None:
            raise UserError(f"fix {self.name!r}: the batch holds no integers of shape [rows, tokens]")
        length = check_smaller(value, now, self.name)
        if name is not None:
            return replace(workload, sizes={**(workload.sizes or {}), name: length})
        cut = partial(_first_tokens, now=now, length=length)
        return replace(workload, batch=Changed(workload.batch, cut))


def _length(workload: Workload, size: str | None) -> tuple[str | None, int | None]:
    """The size that is the length, if one is, and the length."""
    name = size_named(workload, size, tuple(_USUAL), ShorterSequence.name)
    if name is not None:
        return name, (workload.sizes or {})[name]
    tokens = [tensor for tensor in tensors_of(batch_of(workload)) if _is_tokens(tensor)]
    return None, tokens[0].shape[1] if tokens else None


def _is_tokens(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex()


def _first_tokens(tensor: torch.Tensor, batch: Any, *, now: int, length: int) -> torch.Tensor:
    if not _is_tokens(tensor) or tensor.shape[1] != now:
        return tensor
    return tensor[:, :length].clone()  # so that the others are freed
