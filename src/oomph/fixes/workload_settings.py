"""Fixes that set one field of the Workload: dtype, autocast, settings of torch's caching allocator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from oomph import gpus
from oomph.errors import UserError
from oomph.fixes.registry import Fix, FixContext, Target, check_whole_number, parameter_dtype
from oomph.prediction.allocator import replay
from oomph.records import AllocatorSettings
from oomph.units import MiB
from oomph.workload import Workload, allocator_of_environment

_FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability
_SMALLEST_SPLIT = 21  # MiB; torch refuses less
_SPLITS_TRIED = (32, 64, 128, 256, 512, 1024)


class Autocast(Fix):
    name = "autocast"
    kind = "precision"
    changes = (
        "Matrix products and convolutions take and return bfloat16, with 8 bits of precision instead of 24; "
        "parameters, gradients, sums, norms and losses stay float32."
    )

    def targets(self, context: FixContext) -> Iterable[Target]:
        if context.workload.autocast is None and _is_float32(context) and not lacks_bfloat16(context):
            yield Target(("forward",))

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        if workload.autocast is not None:
            raise UserError(
                f"fix {self.name!r}: the workload already runs under {workload.autocast} autocast"
            )
        if workload.dtype in (torch.bfloat16, torch.float16):
            raise UserError(f"fix {self.name!r}: the parameters are {workload.dtype}; nothing to cast")
        return replace(workload, autocast=torch.bfloat16)


class BFloat16Parameters(Fix):
    name = "bf16_parameters"
    kind = "precision"
    changes = (
        "Parameters, gradients, activations and optimizer state are bfloat16, with 8 bits of precision "
        "instead of 24: an update smaller than 1/512 of its parameter is lost."
    )
    excludes: ClassVar = {
        "autocast": "with bfloat16 parameters there is nothing to cast",
        "stochastic_rounding": "that makes the parameters bfloat16 itself",
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        if _is_float32(context) and not lacks_bfloat16(context):
            yield Target(("parameters",), {}, "stochastic_rounding keeps small updates, on average")

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        if workload.dtype in (torch.bfloat16, torch.float16):
            raise UserError(f"fix {self.name!r}: the parameters are already {workload.dtype}")
        # Autocast would only cost time.
        return replace(workload, dtype=torch.bfloat16, autocast=None)


def _is_float32(context: FixContext) -> bool:
    """Whether most of the parameters are float32 or wider."""
    numel = {True: 0, False: 0}
    for parameter in context.model.parameters():
        wide = parameter_dtype(context.workload, parameter) in (torch.float32, torch.float64)
        numel[wide] += parameter.numel()
    return numel[True] > numel[False]


def lacks_bfloat16(context: FixContext) -> bool:
    """Whether the GPU has no bfloat16 arithmetic and converts to float32."""
    if context.prediction.gpu is None:
        return False
    return gpus.find(context.prediction.gpu).capability < _FIRST_WITH_BFLOAT16


class Allocator(Fix):
    name = "allocator"
    kind = "exact"
    changes = "The caching allocator reserves memory in another way, which leaves fewer unused holes."

    def targets(self, context: FixContext) -> Iterable[Target]:
        workload: Workload | None = context.workload  # None: a script
        if workload.allocator if workload is not None else allocator_of_environment():
            return
        now = context.prediction.peak.reserved
        expandable = _reserved(context, AllocatorSettings(expandable_segments=True))
        if expandable < now:
            note = "needs Linux; memory cannot be shared between processes then"
            yield Target(("allocator",), {"expandable_segments": True}, note, saving=now - expandable)
        reserved = {size: _reserved(context, AllocatorSettings(False, size * MiB)) for size in _SPLITS_TRIED}
        best = min(_SPLITS_TRIED, key=reserved.__getitem__)
        if reserved[best] < now:
            options = {"expandable_segments": False, "max_split_size_mb": best}
            note = "the best of " + ", ".join(map(str, _SPLITS_TRIED))
            yield Target(("allocator",), options, note, saving=now - reserved[best])

    def change_workload(
        self,
        workload: Workload,
        *_: Any,
        expandable_segments: bool = True,
        max_split_size_mb: int | None = None,
    ) -> Workload:
        """Sets `workload.allocator`, which `predict` and `measure` apply. In a script, `oomph run` sets
        PYTORCH_ALLOC_CONF to its value."""
        settings = self.settings(expandable_segments, max_split_size_mb)
        if workload.allocator:
            raise UserError(f"fix {self.name!r}: the Workload already has allocator={workload.allocator!r}")
        return replace(workload, allocator=settings)

    def settings(self, expandable_segments: bool = True, max_split_size_mb: int | None = None) -> str:
        """As PYTORCH_ALLOC_CONF takes them."""
        split = max_split_size_mb
        if split is not None:
            check_whole_number(self.name, "max_split_size_mb", split, _SMALLEST_SPLIT)
        if not expandable_segments and split is None:
            raise UserError(
                f"fix {self.name!r}: nothing to set; give expandable_segments=True or max_split_size_mb"
            )
        return str(AllocatorSettings(expandable_segments, None if split is None else split * MiB))


def _reserved(context: FixContext, settings: AllocatorSettings) -> int:
    """What the same requests would reserve: a replay, which costs milliseconds."""
    prediction = context.prediction
    return replay(prediction.events, prediction.allocations, settings=settings).peak_reserved
