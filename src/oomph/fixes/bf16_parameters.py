"""Parameters in bfloat16, and with them everything that is computed from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from oomph.errors import UserError
from oomph.fixes.precision import has_float32, lacks_bfloat16
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload


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
        if has_float32(context) and not lacks_bfloat16(context):
            yield Target(("parameters",), {}, "stochastic_rounding keeps small updates, on average")

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        if workload.dtype in (torch.bfloat16, torch.float16):
            raise UserError(f"fix {self.name!r}: the parameters are {workload.dtype} already")
        # Casts would then only cost time.
        return replace(workload, dtype=torch.bfloat16, autocast=None)
