"""Fixes that compute in bfloat16: under autocast, or with bfloat16 parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from oomph import gpus
from oomph.errors import UserError
from oomph.fixes.registry import Fix, FixContext, Target, parameter_dtype
from oomph.workload import Workload

_FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability


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
