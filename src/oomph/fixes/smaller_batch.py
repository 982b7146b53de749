"""Fewer rows in a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oomph.errors import UserError
from oomph.fixes.batches import Changed, batch_of, check_smaller, size_named
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload, rows_of

_USUAL = ("b", "bs", "batch", "batch_size", "rows", "n", "examples", "samples", "images")


class SmallerBatch(Fix):
    name = "smaller_batch"
    kind = "training"
    changes = "The batch has fewer rows: gradients are noisier, and the learning rate may have to follow."

    def targets(self, context: FixContext) -> Iterable[Target]:
        _, now = _rows(context.workload, None)
        if now is not None and now >= 2:
            yield Target(("batch",), {"value": now // 2}, f"{now // 2} rows instead of {now}")

    def change_workload(
        self, workload: Workload, *_: Any, size: str | None = None, value: int | None = None
    ) -> Workload:
        """`size`: which of the workload's sizes counts the rows; `value`: how many there are to be, by
        default half."""
        name, now = _rows(workload, size)
        if now is None:
            raise UserError(f"fix {self.name!r}: the batch holds no tensor with rows")
        rows = check_smaller(value, now, self.name)
        if name is not None:
            return replace(workload, sizes={**(workload.sizes or {}), name: rows})
        return replace(workload, batch=Changed(workload.batch, partial(_first_rows, rows=rows)))


def _rows(workload: Workload, size: str | None) -> tuple[str | None, int | None]:
    """The size that counts the rows, if one does, and how many there are."""
    name = size_named(workload, size, _USUAL, SmallerBatch.name)
    if name is not None:
        return name, (workload.sizes or {})[name]
    try:
        return None, rows_of(batch_of(workload))
    except UserError:
        return None, None


def _first_rows(tensor: torch.Tensor, batch: Any, *, rows: int) -> torch.Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != rows_of(batch):
        return tensor
    return tensor[:rows].clone()  # so that the others are freed
