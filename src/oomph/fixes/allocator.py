"""Settings of torch's caching allocator that leave fewer holes between tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from oomph.errors import UserError
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.prediction.allocator import AllocatorSettings
from oomph.prediction.replay import replay
from oomph.units import MiB
from oomph.workload import Workload

_LEAST_SPLIT = 20  # torch takes only more
_SPLITS_TRIED = (32, 64, 128, 256, 512, 1024)


class Allocator(Fix):
    name = "allocator"
    kind = "exact"
    changes = "The caching allocator reserves memory in another way, which leaves fewer unused holes."

    def targets(self, context: FixContext) -> Iterable[Target]:
        if context.workload.allocator:
            return
        if _reserved(context, AllocatorSettings(expandable_segments=True)) < context.prediction.peak.reserved:
            note = "needs Linux; memory cannot be shared between processes then"
            yield Target(("allocator",), {"expandable_segments": True}, note)
        best = min(_SPLITS_TRIED, key=lambda size: _reserved(context, AllocatorSettings(False, size * MiB)))
        if _reserved(context, AllocatorSettings(False, best * MiB)) < context.prediction.peak.reserved:
            options = {"expandable_segments": False, "max_split_size_mb": best}
            yield Target(("allocator",), options, "the best of " + ", ".join(map(str, _SPLITS_TRIED)))

    def change_workload(  # type: ignore[override]
        self,
        workload: Workload,
        *,
        expandable_segments: bool = True,
        max_split_size_mb: int | None = None,
    ) -> Workload:
        """Sets `workload.allocator`, which `predict` and `measure` follow. A script of your own needs what it
        then says in PYTORCH_CUDA_ALLOC_CONF."""
        if not isinstance(expandable_segments, bool):
            raise UserError(
                f"fix 'allocator': expandable_segments={expandable_segments!r} is not valid; "
                "valid: True, False"
            )
        if max_split_size_mb is not None and not _is_split_size(max_split_size_mb):
            raise UserError(
                f"fix 'allocator': max_split_size_mb={max_split_size_mb!r} is not valid; "
                f"valid: None, or a whole number above {_LEAST_SPLIT}"
            )
        if not expandable_segments and max_split_size_mb is None:
            raise UserError(
                "fix 'allocator': nothing to set; give expandable_segments=True or max_split_size_mb"
            )
        if workload.allocator:
            raise UserError(f"fix 'allocator': the Workload has allocator={workload.allocator!r} already")
        split = None if max_split_size_mb is None else max_split_size_mb * MiB
        return replace(workload, allocator=str(AllocatorSettings(expandable_segments, split)))


def _is_split_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > _LEAST_SPLIT


def _reserved(context: FixContext, settings: AllocatorSettings) -> int:
    """What the same requests would take: a replay, which costs milliseconds."""
    prediction = context.prediction
    return replay(prediction.events, prediction.allocations, settings=settings).peak_reserved
