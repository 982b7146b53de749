"""Products in bfloat16 from parameters that stay float32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from oomph.errors import UserError
from oomph.fixes.precision import has_float32, lacks_bfloat16
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload


class Autocast(Fix):
    name = "autocast"
    kind = "precision"
    changes = (
        "Matrix products and convolutions take and give bfloat16, with 8 bits of precision instead of 24; "
        "parameters, gradients, sums, norms and losses stay float32."
    )

    def targets(self, context: FixContext) -> Iterable[Target]:
        if context.workload.autocast is None and has_float32(context) and not lacks_bfloat16(context):
            yield Target(("forward",))

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        if workload.autocast is not None:
            raise UserError(
                f"fix {self.name!r}: the workload runs under autocast to {workload.autocast} already"
            )
        if workload.dtype in (torch.bfloat16, torch.float16):
            raise UserError(
                f"fix {self.name!r}: the parameters are {workload.dtype}; there is nothing to cast"
            )
        return replace(workload, autocast=torch.bfloat16)
