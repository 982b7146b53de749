"""Optimizer in backward: a parameter is updated when its gradient is complete, which is then freed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import (
    OptimizerFix,
    ReplacingOptimizer,
    parameters_of,
    why_not_independent,
)
from oomph.fixes.registry import FixContext, Target
from oomph.workload import Workload


class OptimizerInBackward(OptimizerFix):
    name = "optimizer_in_backward"
    kind = "exact"
    changes = "Each parameter is updated as soon as its gradient is complete, and the gradient is freed."
    excludes: ClassVar = {"micro_batches": "a gradient is used and freed before the next part's is added"}
    note = "excludes clipping by the global norm and gradient accumulation"

    def targets(self, context: FixContext) -> Iterable[Target]:
        return super().targets(context) if _why_not_at_once(context.workload) is None else []

    def change_workload(self, workload: Workload, *_: Any, independent: bool = False) -> Workload:
        """`independent`: the user says that an optimizer which is not torch's own updates each parameter
        independently."""
        why = _why_not_at_once(workload)
        if why is not None:
            raise UserError(f"fix {self.name!r}: {why}, and a gradient is freed before the next is added")
        return self.converting(workload, independent=independent)

    def why_not(self, optimizer: Optimizer, *, independent: bool = False, **options: Any) -> str | None:
        return why_not_independent(optimizer, independent)

    def convert(self, optimizer: Optimizer, **options: Any) -> Optimizer:
        return InBackwardOptimizer(optimizer)


def _why_not_at_once(workload: Workload) -> str | None:
    if workload.accumulate > 1:
        return f"the workload accumulates over {workload.accumulate} batches"
    if workload.micro_batches is not None:
        return f"the workload's batch comes in {workload.micro_batches.parts} parts"
    return None


class InBackwardOptimizer(ReplacingOptimizer):
    """Steps another optimizer from post-accumulate-grad hooks, one parameter at a time.

    `param_groups` and `state` are the inner optimizer's, so schedulers and checkpoints work unchanged.
    `step()` marks the end of a step; it updates only parameters whose gradients were set by hand.
    """

    updates_in_backward = True  # for loops that clip or accumulate gradients: there are none to clip

    def __init__(self, inner: Optimizer) -> None:
        self.inner: Optimizer | None = None
        super().__init__(inner)
        self.inner = inner
        self._single_groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._group_of: dict[torch.Tensor, dict[str, Any]] = {}
        self._updated: set[torch.Tensor] = set()
        self._hooked: set[torch.Tensor] = set()
        handles: list[Any] = []
        self._handles = handles
        self._lock = threading.RLock()  # autograd has a thread for each device
        # The model may outlive this optimizer and must then train without it.
        weakref.finalize(self, _remove_hooks, handles)
        self._share_groups_and_state()

    def _share_groups_and_state(self) -> None:
        """Use the inner optimizer's groups and state, and hook every trainable parameter."""
        assert self.inner is not None
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        hook = partial(_on_gradient, weakref.ref(self))
        for group in self.param_groups:
            for parameter in group["params"]:
                self._group_of[parameter] = group
                if parameter.requires_grad and parameter not in self._hooked:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
                    self._hooked.add(parameter)

    def update(self, parameter: torch.Tensor) -> None:
        """Step the inner optimizer for this parameter alone, and free its gradient."""
        with self._lock:
            inner = self.inner
            assert inner is not None
            if parameter in self._updated:
                raise RuntimeError(
                    "optimizer_in_backward: a parameter received a second gradient before optimizer.step(). "
                    "Call step() after every backward; accumulation and reentrant checkpoints of shared "
                    "weights are excluded"
                )
            all_groups, group = inner.param_groups, self._group_of[parameter]
            # Each parameter has a group of its own, so that what an optimizer counts per group is counted
            # once a step. Schedulers change hyperparameters in the shared group, so they are copied.
            own = self._single_groups.setdefault(parameter, {**group, "params": [parameter]})
            own.update((key, group[key]) for key in inner.defaults if key in group)
            inner.param_groups = [own]
            try:
                inner.step()
            finally:
                inner.param_groups = all_groups
            parameter.grad = None
            self._updated.add(parameter)

    def update_parameters(self) -> None:
        for parameter in parameters_of(self):
            if parameter.grad is not None:
                self.update(parameter)
        self._updated.clear()

    def register_step_pre_hook(self, hook: Any) -> Any:
        raise UserError(
            "fix 'optimizer_in_backward': before step() the parameters are updated and their gradients "
            "are freed, so a pre-hook has nothing to see; register_step_post_hook works"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to zero."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.inner is None:  # called by Optimizer.__init__
            return super().add_param_group(param_group)
        self.inner.add_param_group(param_group)
        self._share_groups_and_state()

    def state_dict(self) -> dict[str, Any]:
        assert self.inner is not None
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.inner is not None
        self.inner.load_state_dict(state_dict)
        self._single_groups.clear()
        self._share_groups_and_state()


def _on_gradient(optimizer: weakref.ref[InBackwardOptimizer], parameter: torch.Tensor) -> None:
    alive = optimizer()
    if alive is not None:
        alive.update(parameter)


def _remove_hooks(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
