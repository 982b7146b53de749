"""The update inside the backward pass: no more than a few gradients are alive at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import optimizer_of, with_converted_optimizer
from oomph.fixes.optimizers.in_backward import check_steps_apart, in_backward
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload


class OptimizerInBackward(Fix):
    name = "optimizer_in_backward"
    kind = "exact"
    changes = "Each parameter is updated as soon as its gradient is complete, and the gradient is freed."
    excludes: ClassVar = {
        "micro_batches": "a gradient is used and freed before the next part would be added to it"
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        workload, optimizer = context.workload, optimizer_of(context)
        if optimizer is None or workload.accumulate > 1 or workload.micro_batches is not None:
            return
        try:
            check_steps_apart(optimizer, self.name, independent=False)
        except UserError:
            return
        note = "excludes clipping by the global norm and gradient accumulation"
        yield Target(("optimizer",), {}, note)

    def change_workload(self, workload: Workload, *_: Any, independent: bool = False) -> Workload:
        """`independent`: the user's word that an optimizer which is not torch's own steps each parameter by
        itself."""
        if not isinstance(independent, bool):
            raise UserError(
                f"fix {self.name!r}: independent={independent!r} is not valid; valid: true, false"
            )
        if workload.accumulate > 1:
            raise UserError(
                f"fix {self.name!r}: the workload accumulates over {workload.accumulate} batches, and a "
                "gradient is used and freed before the next is added to it"
            )
        if workload.micro_batches is not None:
            raise UserError(
                f"fix {self.name!r}: the workload's batch comes in {workload.micro_batches.parts} parts, and "
                "a gradient is used and freed before the next part's is added to it"
            )
        convert = partial(in_backward, fix=self.name, independent=independent)
        return with_converted_optimizer(workload, self.name, convert)
