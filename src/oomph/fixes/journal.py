"""The journal of the changes that fixes made to one model: lists them, and undoes them exactly.

Fixes change a model only through a Journal, and only this instance: attributes of its modules, never a class
or a library (`compile` also sets an option of torch). A journal undoes in reverse order, all of it or back to
a mark, so a fix that fails half-way leaves nothing behind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from oomph.errors import UserError
from oomph.records import Change, FixUse

_ABSENT = object()
# Raises where a change cannot be undone. Takes the attributes that were already checked.
Check = Callable[[set[tuple[int, str]]], None]


class WrappedForward:
    """A module's forward inside another function: calls `wrapper(inner, *args, **kwargs)`.

    An object and not a closure, so that a deep copy of the model calls the copy's modules.
    """

    def __init__(self, inner: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
        self.inner, self.wrapper = inner, wrapper
        self.__signature__ = inspect.signature(inner)  # libraries inspect which arguments a model takes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.inner, *args, **kwargs)


def module_of(forward: Callable[..., Any]) -> nn.Module | None:
    """The module whose forward this is, inside any wrappers."""
    while isinstance(forward, WrappedForward):
        forward = forward.inner
    module = getattr(forward, "__self__", None)
    return module if isinstance(module, nn.Module) else None


class Mark(NamedTuple):
    """Lengths of a journal's lists at one moment."""

    uses: int
    changes: int


class Journal:
    def __init__(self) -> None:
        self.uses: list[FixUse] = []
        self.changes: list[Change] = []
        self._undo_steps: list[tuple[Callable[[], None], Check | None]] = []
        self._fix = ""
        self.is_copy = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model's journal cannot undo: its undo steps hold the original's modules."""
        return _copied_journal, (tuple(self.uses), tuple(self.changes))

    def mark(self) -> Mark:
        return Mark(len(self.uses), len(self.changes))

    def begin(self, use: FixUse) -> None:
        """All changes from here on belong to `use`."""
        self.uses.append(use)
        self._fix = use.fix

    def set(self, owner: Any, name: str, value: Any, where: str, what: str) -> None:
        """Set an attribute of a module (a parameter, buffer or child keeps its position) or of any object."""
        attributes = _attributes(owner, name)
        before, fix = attributes.get(name, _ABSENT), self._fix
        attributes[name] = value

        def check(checked: set[tuple[int, str]]) -> None:
            key, now = (id(attributes), name), attributes.get(name, _ABSENT)
            if key in checked:  # a later fix has set it again and was checked
                return
            checked.add(key)
            if now is not value and not isinstance(now, torch.Tensor):  # moving a model makes new tensors
                raise UserError(
                    f"{name!r} of {where or 'the model'!r} was replaced after fix {fix!r} had set it; "
                    "revert that first, then undo"
                )

        def undo() -> None:
            if before is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = _moved_like(before, attributes.get(name))

        self.record(where, what, undo, check)

    def wrap_forward(self, module: nn.Module, wrapper: Callable[..., Any], where: str, what: str) -> None:
        """`module(...)` becomes `wrapper(forward, ...)`. Give a function or a partial of one, not a closure
        over modules: see WrappedForward."""
        self.set(module, "forward", WrappedForward(module.forward, wrapper), where, what)

    def record(self, where: str, what: str, undo: Callable[[], None], check: Check | None = None) -> None:
        """Record any other change: how to undo it, and a check that raises where that is impossible."""
        self.changes.append(Change(self._fix, where, what))
        self._undo_steps.append((undo, check))

    def undo(self, mark: Mark | None = None) -> None:
        """Undo everything, or what came after the mark. Nothing is undone if some of it cannot be."""
        if mark is None:
            mark = Mark(0, 0)
            checked: set[tuple[int, str]] = set()
            for _, check in reversed(self._undo_steps):
                if check is not None:
                    check(checked)
        while len(self._undo_steps) > mark.changes:
            self._undo_steps.pop()[0]()
        del self.changes[mark.changes :], self.uses[mark.uses :]


def _copied_journal(uses: tuple[FixUse, ...], changes: tuple[Change, ...]) -> Journal:
    journal = Journal()
    journal.uses, journal.changes, journal.is_copy = list(uses), list(changes), True
    return journal


def _moved_like(before: Any, now: Any) -> Any:
    """A tensor that a fix replaced, on the device and in the dtype of its replacement."""
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        dtype = now.dtype if before.is_floating_point() and now.is_floating_point() else before.dtype
        if (before.device, before.dtype) != (now.device, dtype):
            before.data = before.data.to(now.device, dtype)
    return before


def _attributes(owner: Any, name: str) -> dict[str, Any]:
    """The dictionary that holds the attribute. Setting it there keeps its position among the others."""
    if isinstance(owner, nn.Module):
        for attributes in (owner._parameters, owner._buffers, owner._modules):
            if name in attributes:
                return attributes  # type: ignore[return-value]
    return vars(owner)
