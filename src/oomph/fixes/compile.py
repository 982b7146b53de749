"""torch.compile and its activation-memory budget."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.records import COMPILED_STEP_TIMES
from oomph.torch_internals import functorch_config

_BUDGETS = (None, 0.5, 0.3)
_LAZY = "the compiler traces the layers themselves, so it would have no effect"
_GRAPH_BREAKS = "its hooks would end the compiled graph at every block"


class Compile(Fix):
    name = "compile"
    kind = "compile"
    changes = "torch.compile fuses kernels, and chooses what is saved for backward and what is recomputed."
    excludes: ClassVar = {
        "activation_offloading": _GRAPH_BREAKS,
        "fsdp2": _GRAPH_BREAKS,
        "fused_attention": _LAZY,
        "fused_linear_cross_entropy": _LAZY,
        "gradient_accumulation_fusion": _LAZY,
    }

    def targets(self, context: FixContext) -> Iterable[Target]:
        note = COMPILED_STEP_TIMES
        if any(isinstance(each, nn.Dropout) and each.p for each in context.model.modules()):
            note = f"dropout draws other random numbers; {note}"
        for budget in _BUDGETS:
            yield Target(("",), {} if budget is None else {"activation_memory_budget": budget}, note)

    def change_model(
        self, model: nn.Module, journal: Journal, *, activation_memory_budget: float | None = None
    ) -> None:
        """`activation_memory_budget`: the part of what torch.compile saves for backward by default that it
        may save, from 1 (all) to 0 (inputs only). It is set for the process, so that it also holds for models
        that the program itself compiles."""
        budget: Any = activation_memory_budget
        is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
        if budget is not None and not (is_number and 0 <= budget <= 1):
            raise UserError(
                f"fix {self.name!r}: activation_memory_budget={budget!r} is not valid; give 0 to 1"
            )
        journal.set(model, "_compiled_call_impl", torch.compile(model._call_impl), "", "compiled")
        if budget is None or budget == functorch_config.activation_memory_budget:
            return

        def check(checked: set[tuple[int, str]]) -> None:
            if functorch_config.activation_memory_budget != budget:
                raise UserError(
                    f"activation_memory_budget was changed after fix {self.name!r} had set it; "
                    "revert that first, then undo"
                )

        before, functorch_config.activation_memory_budget = functorch_config.activation_memory_budget, budget
        what = f"activation_memory_budget: {before} -> {budget}"
        undo = partial(setattr, functorch_config, "activation_memory_budget", before)
        journal.record("torch._functorch.config", what, undo, check)
