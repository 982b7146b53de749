"""Each parameter updated as soon as its gradient is complete, which is freed at once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from oomph.errors import UserError
from oomph.fixes.optimizers.conversion import kind_of, parameters_of, takes_over_hooks


class InBackward(Optimizer):
    """Runs another optimizer from inside the backward pass, one parameter at a time.

    `param_groups` and `state` are the other's own, so schedulers and checkpoints work as ever. `step()` tells
    that a step is over: it updates what backward has left (gradients written by hand), mostly nothing.
    """

    updates_in_backward = True  # for loops that clip or accumulate gradients: there will be none to clip

    def __init__(self, inner: Optimizer) -> None:
        self.inner: Optimizer | None = None
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        takes_over_hooks(self, inner)
        self._own_groups: dict[torch.Tensor, dict[str, Any]] = {}
        self._group_of: dict[torch.Tensor, dict[str, Any]] = {}
        self._updated: set[torch.Tensor] = set()
        self._hooked: set[torch.Tensor] = set()
        handles: list[Any] = []
        self._handles = handles
        self._stepping = threading.RLock()  # autograd has a thread for each device
        # The model may outlive this optimizer, and must then train without it.
        weakref.finalize(self, _remove, handles)
        self._share()

    def _share(self) -> None:
        """The other optimizer's groups and state are ours, and every trainable parameter has its hook."""
        assert self.inner is not None
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        on_gradient = partial(_on_gradient, weakref.ref(self))
        for group in self.param_groups:
            for parameter in group["params"]:
                self._group_of[parameter] = group
                if parameter.requires_grad and parameter not in self._hooked:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))
                    self._hooked.add(parameter)

    def update(self, parameter: torch.Tensor) -> None:
        """One step of the other optimizer for this parameter alone; its gradient is gone afterwards."""
        with self._stepping:
            self._update(parameter)

    def _update(self, parameter: torch.Tensor) -> None:
        inner = self.inner
        assert inner is not None
        if parameter in self._updated:
            raise RuntimeError(
                "optimizer_in_backward: a parameter received a second gradient before optimizer.step(). Call "
                "step() after every backward; accumulation and reentrant checkpoints of shared weights are "
                "excluded"
            )
        whole, group = inner.param_groups, self._group_of[parameter]
        # Each parameter has a group of its own: what an optimizer counts per group is then counted once a
        # step. Hyperparameters come from the shared group each time, since schedulers change them there.
        own = self._own_groups.setdefault(parameter, {**group, "params": [parameter]})
        own.update((key, group[key]) for key in inner.defaults if key in group)
        inner.param_groups = [own]
        try:
            inner.step()
        finally:
            inner.param_groups = whole
        parameter.grad = None
        self._updated.add(parameter)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in parameters_of(self):
            if parameter.grad is not None:
                self.update(parameter)
        self._updated.clear()
        return loss

    def register_step_pre_hook(self, hook: Any) -> Any:
        raise UserError(
            "fix 'optimizer_in_backward': before step() the parameters are updated and their gradients "
            "gone, so a hook there has nothing to see; register_step_post_hook works"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to zero."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.inner is None:  # called while this object is being made
            return super().add_param_group(param_group)
        self.inner.add_param_group(param_group)
        self._share()

    def state_dict(self) -> dict[str, Any]:
        assert self.inner is not None
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self.inner is not None
        self.inner.load_state_dict(state_dict)
        self._own_groups.clear()
        self._share()


def _on_gradient(optimizer: weakref.ref[InBackward], parameter: torch.Tensor) -> None:
    alive = optimizer()
    if alive is not None:
        alive.update(parameter)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


# Of torch's own, all but LBFGS step each parameter by itself.
_APART = (
    "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD SparseAdam".split()
)


def check_steps_apart(optimizer: Optimizer, fix: str, independent: bool) -> None:
    """A UserError for an optimizer that may look at several parameters at once."""
    kind = type(optimizer)
    known = [getattr(torch.optim, name, None) for name in _APART]
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(f"fix {fix!r}: LBFGS looks at all gradients at once, so it cannot step one by one")
    if getattr(optimizer, "updates_in_backward", False):
        raise UserError(f"fix {fix!r}: {kind_of(optimizer)} updates in backward already")
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        raise UserError(f"fix {fix!r}: the optimizer has hooks before its step, which see all gradients")
    if independent or kind in known or getattr(kind, "steps_each_parameter_alone", False):
        return
    raise UserError(
        f"fix {fix!r}: {kind_of(optimizer)} is not known to update each parameter by itself; "
        "if it does, give independent=true"
    )


def in_backward(optimizer: Optimizer, *, fix: str, independent: bool) -> Optimizer:
    check_steps_apart(optimizer, fix, independent)
    return InBackward(optimizer)
