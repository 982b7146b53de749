"""Settings of torch's caching allocator that leave fewer holes between tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from oomph.errors import UserError
from oomph.fixes.registry import Fix, FixContext, Target, check_flag, check_whole_number
from oomph.prediction.allocator import AllocatorSettings
from oomph.prediction.replay import replay
from oomph.units import MiB
from oomph.workload import Workload

_SMALLEST_SPLIT = 21  # MiB; torch refuses less
_SPLITS_TRIED = (32, 64, 128, 256, 512, 1024)


class Allocator(Fix):
    name = "allocator"
    kind = "exact"
    changes = "The caching allocator reserves memory in another way, which leaves fewer unused holes."

    def targets(self, context: FixContext) -> Iterable[Target]:
        if context.workload.allocator:
            return
        now = context.prediction.peak.reserved
        if _reserved(context, AllocatorSettings(expandable_segments=True)) < now:
            note = "needs Linux; memory cannot be shared between processes then"
            yield Target(("allocator",), {"expandable_segments": True}, note)
        reserved = {size: _reserved(context, AllocatorSettings(False, size * MiB)) for size in _SPLITS_TRIED}
        best = min(_SPLITS_TRIED, key=reserved.__getitem__)
        if reserved[best] < now:
            options = {"expandable_segments": False, "max_split_size_mb": best}
            yield Target(("allocator",), options, "the best of " + ", ".join(map(str, _SPLITS_TRIED)))

    def change_workload(
        self,
        workload: Workload,
        *_: Any,
        expandable_segments: bool = True,
        max_split_size_mb: int | None = None,
    ) -> Workload:
        """Sets `workload.allocator`, which `predict` and `measure` apply. In a script of your own, set
        PYTORCH_CUDA_ALLOC_CONF to its value."""
        check_flag(self.name, "expandable_segments", expandable_segments)
        split = max_split_size_mb
        if split is not None:
            check_whole_number(self.name, "max_split_size_mb", split, _SMALLEST_SPLIT)
        if not expandable_segments and split is None:
            raise UserError(
                f"fix {self.name!r}: nothing to set; give expandable_segments=True or max_split_size_mb"
            )
        if workload.allocator:
            raise UserError(f"fix {self.name!r}: the Workload already has allocator={workload.allocator!r}")
        settings = AllocatorSettings(expandable_segments, None if split is None else split * MiB)
        return replace(workload, allocator=str(settings))


def _reserved(context: FixContext, settings: AllocatorSettings) -> int:
    """What the same requests would reserve: a replay, which costs milliseconds."""
    prediction = context.prediction
    return replay(prediction.events, prediction.allocations, settings=settings).peak_reserved
