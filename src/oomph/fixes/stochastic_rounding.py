"""Parameters in bfloat16 without a float32 copy: what an update would lose to rounding is kept on average."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch

from oomph.errors import UserError
from oomph.fixes.optimizers.compact import Compact, compact, why_not
from oomph.fixes.optimizers.conversion import optimizer_of, with_converted_optimizer
from oomph.fixes.precision import lacks_bfloat16
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.workload import Workload

KEPT = ("bfloat16", "float32")


class StochasticRounding(Fix):
    name = "stochastic_rounding"
    kind = "precision"
    changes = (
        "Parameters, gradients and activations are bfloat16; updates are computed in float32 and rounded at "
        "random to one of the two nearest bfloat16 numbers, right on average."
    )
    excludes: ClassVar = {
        "fused_optimizer": "the rounding needs a step of its own, which is one kernel a parameter already",
        "no_foreach": "the rounding needs a step of its own, which goes parameter by parameter already",
        "autocast": "the parameters are bfloat16, so there is nothing to cast",
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = optimizer_of(context)
        if lacks_bfloat16(context) or optimizer is None:
            return
        if isinstance(optimizer, Compact) and optimizer.stochastic:
            return
        if isinstance(optimizer, Compact):
            yield Target(("optimizer",), {}, "the state stays as it is kept now")
        elif why_not(optimizer, sgd=True) is None:
            yield Target(("optimizer",), {"state": "bfloat16"})
            yield Target(("optimizer",), {"state": "float32"}, "the optimizer's averages stay float32")

    def change_workload(self, workload: Workload, *_: Any, state: str = "bfloat16") -> Workload:
        """`state`: what averages and momentum are kept in; 8-bit ones stay so."""
        if state not in KEPT:
            raise UserError(f"fix {self.name!r}: state={state!r} is not valid; valid: {', '.join(KEPT)}")
        convert = partial(compact, fix=self.name, kept=state, stochastic=True, sgd=True)
        workload = with_converted_optimizer(workload, self.name, convert)
        return replace(workload, dtype=torch.bfloat16, autocast=None)
