"""Gradients freed after the update, where zero_grad() would fill them with zeros and keep them."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from oomph.fixes.optimizers.conversion import parameters_of, with_converted_optimizer
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.records import Prediction
from oomph.workload import Workload


class SetToNone(Fix):
    name = "set_to_none"
    kind = "exact"
    changes = "optimizer.zero_grad() frees the gradients instead of filling them with zeros."

    def targets(self, context: FixContext) -> Iterable[Target]:
        optimizer = context.workload.optimizer
        if optimizer is None or getattr(optimizer, "gradients_must_stay", False):
            return
        if _gradients_left(context.prediction):
            yield Target(
                ("optimizer",), {}, "a parameter without gradient in a step is then not updated in it"
            )

    def change_workload(self, workload: Workload, *_: Any) -> Workload:
        return with_converted_optimizer(workload, self.name, _freeing)


def _freeing(optimizer: Optimizer) -> Optimizer:
    optimizer.zero_grad = MethodType(_free_gradients, optimizer)  # type: ignore[method-assign]
    return optimizer


def _free_gradients(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Whatever is asked for: set_to_none=False is what the fix is there to change."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def _gradients_left(prediction: Prediction) -> bool:
    """Are gradients alive after the last step?"""
    alive: set[int] = set()
    for event in prediction.events:
        if event.action == "alloc" and prediction.allocations[event.id].kind == "gradient":
            alive.add(event.id)
        elif event.action == "free":
            alive.discard(event.id)
    return bool(alive)
