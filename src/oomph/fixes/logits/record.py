"""Logits that are not computed yet: what they would be, and how to compute them after all.

A Later is a plain record; `tensor` dresses it as a tensor. Every call of a head makes one Source, which all
logits that descend from it share.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oomph.errors import UserError
from oomph.ops.common import autocast_enabled, matmul_dtype


class Source:
    """One call of a head: its input and parameters, and the circumstances it was made in."""

    def __init__(
        self,
        head: nn.Linear,
        forward: Callable[[Tensor], Tensor],
        hidden: Tensor,
        *,
        memory_budget: str | int | None = None,
        into_grad: bool = False,
    ) -> None:
        self.forward, self.memory_budget, self.into_grad = forward, memory_budget, into_grad
        self.hidden, self.weight, self.bias = hidden, head.weight, head.bias
        self.dtype = matmul_dtype(hidden)
        self.autocast = self.dtype if autocast_enabled(hidden) else None
        self.recording = torch.is_grad_enabled()
        self.computed = False  # the logits are there after all, so nothing is left to save
        self._versions = self._versions_now()
        self._members: list[weakref.ref[Later]] = []
        self.as_program = _program_view()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None)

    def check_unchanged(self) -> None:
        """Computed later must mean computed from the same numbers."""
        if self._versions != self._versions_now():
            raise UserError(
                "logits of a head with fix 'fused_linear_cross_entropy' are used after its input or "
                "weight was changed in place (by an optimizer's step?); use them before, or "
                "keep logits.clone()"
            )

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.inputs)

    def under_its_autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The product runs in the dtype it would have had where the head was called."""
        now = matmul_dtype(self.hidden) if autocast_enabled(self.hidden) else None
        if now == self.autocast:
            return contextlib.nullcontext()
        kind = self.hidden.device.type
        return torch.autocast(
            kind, self.autocast or torch.get_autocast_dtype(kind), self.autocast is not None
        )

    def add(self, member: Later) -> None:
        self._members.append(weakref.ref(member))

    def compute_all(self) -> None:
        """Before something is written into: what descends from it as a copy must not see that."""
        for reference in self._members:
            member = reference()
            if member is not None:
                member.value()


@dataclass(frozen=True)
class Meaning:
    """What logits are in terms of a hidden state [..., D] and a head, as a loss can take them.

    logits = factor * product, or post * tanh(factor * product) where `capped`; with `normalized`, their
    log-softmax. The classes are the last dimension, or with `classes_second` the one after the first.
    """

    hidden: Tensor
    dtype: torch.dtype
    factor: float = 1.0
    capped: bool = False
    post: float = 1.0
    normalized: bool = False
    classes_second: bool = False

    def shape(self, classes: int) -> tuple[int, ...]:
        lead = tuple(self.hidden.shape[:-1])
        return (lead[0], classes, *lead[1:]) if self.classes_second else (*lead, classes)

    def times(self, number: float) -> Meaning | None:
        if self.normalized:
            return None
        if self.capped:
            return replace(self, post=self.post * number)
        return replace(self, factor=self.factor * number)


Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Later:
    """Logits, or what a few functions made of them, with the way to compute them."""

    def __init__(
        self, source: Source, meaning: Meaning, parent: Later | None = None, step: Step | None = None
    ) -> None:
        self.source, self.meaning, self.parent, self.step = source, meaning, parent, step
        before = source if parent is None else parent
        self.recording: bool = before.recording and torch.is_grad_enabled()
        self._value: Tensor | None = None
        source.add(self)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meaning.shape(self.source.weight.shape[0])

    def followed_by(self, meaning: Meaning, step: Step) -> Later:
        return Later(self.source, meaning, self, step)

    def value(self) -> Tensor:
        """As if it had never been deferred; computed once."""
        if self._value is None:
            with torch.set_grad_enabled(self.recording):
                if self.parent is None or self.step is None:
                    self.source.check_unchanged()
                    with self.source.as_program(), self.source.under_its_autocast():
                        self._value = self.source.forward(self.source.hidden)
                    self.source.computed = True
                else:
                    function, args, kwargs = self.step
                    self._value = function(self.parent.value(), *args, **kwargs)
        assert self._value is not None
        return self._value

    def computed_from(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The same from other tensors, cast by hand: below autograd there is no autocast."""
        if self.parent is None or self.step is None:
            dtype = self.source.dtype
            return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        function, args, kwargs = self.step
        made: Tensor = function(self.parent.computed_from(hidden, weight, bias), *args, **kwargs)
        return made


def _program_view() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A prediction watches the program through a torch function mode, which is off while it handles a call.

    What runs inside such a call is the program's work as well: its mode says how to be watched again.
    """
    for mode in torch.overrides._get_current_function_mode_stack():
        if hasattr(mode, "for_program"):
            view: Callable[[], contextlib.AbstractContextManager[Any]] = mode.for_program
            return view
    return contextlib.nullcontext
