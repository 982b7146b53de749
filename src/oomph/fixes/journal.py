"""What fixes changed in one model, kept so that it can be told, and undone exactly.

Fixes change a model through a Journal alone, and only this instance: attributes of its modules, never a class
or a library. A journal undoes in reverse order, wholly or back to a mark, so that a fix which fails half-way
leaves nothing behind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from oomph.errors import UserError
from oomph.records import Change, FixUse

_ABSENT = object()
# Raises where something cannot be undone; told which attributes were asked about before.
Check = Callable[[set[tuple[int, str]]], None]


class Removable(Protocol):
    def remove(self) -> None: ...


class Around:
    """A module's forward inside another function: calls `around(inner, *args, **kwargs)`.

    An object rather than a closure, so that a copy of the model calls the copy's modules, not the model's.
    """

    def __init__(self, inner: Callable[..., Any], around: Callable[..., Any]) -> None:
        self.inner, self.around = inner, around
        self.__signature__ = inspect.signature(inner)  # libraries ask a model which arguments it takes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self.inner, *args, **kwargs)


class Journal:
    def __init__(self) -> None:
        self.uses: list[FixUse] = []
        self.changes: list[Change] = []
        self._undoing: list[tuple[Callable[[], None], Check | None]] = []
        self._fix = ""
        self.is_a_copy = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Of a copied or pickled model: how to undo is known for the original's modules only."""
        return _copied, (tuple(self.uses), tuple(self.changes))

    def begin(self, use: FixUse) -> Mark:
        """All changes from here on belong to `use`."""
        mark = Mark(len(self.uses), len(self.changes), len(self._undoing))
        self.uses.append(use)
        self._fix = use.fix
        return mark

    def set(self, owner: Any, name: str, value: Any, where: str, what: str) -> None:
        """Set an attribute: of a module (a parameter, buffer or child keeps its place), or of any object."""
        slots = _slots(owner, name)
        before, fix = slots.get(name, _ABSENT), self._fix
        slots[name] = value

        def check(last: set[tuple[int, str]]) -> None:
            key, now = (id(slots), name), slots.get(name, _ABSENT)
            if key in last:  # a later fix has set it again, and was asked
                return
            last.add(key)
            if now is not value and not isinstance(now, torch.Tensor):  # a move makes new tensors
                raise UserError(
                    f"{name!r} of {where or 'the model'!r} was replaced after fix {fix!r} had; "
                    "take that back first, then undo"
                )

        def undo() -> None:
            if before is _ABSENT:
                slots.pop(name, None)
            else:
                slots[name] = _brought_along(before, slots.get(name))

        self.did(where, what, undo, check)

    def wrap_forward(self, module: nn.Module, around: Callable[..., Any], where: str, what: str) -> None:
        """`module(...)` will be `around(forward, ...)`. Give a function or a partial of one, not a closure
        over modules: see Around."""
        self.set(module, "forward", Around(module.forward, around), where, what)

    def keep(self, handle: Removable, where: str, what: str) -> None:
        """A hook that was registered."""
        self.did(where, what, handle.remove)

    def did(self, where: str, what: str, undo: Callable[[], None], check: Check | None = None) -> None:
        """Anything else that was changed, how to undo it, and what raises where that cannot be."""
        self.changes.append(Change(self._fix, where, what))
        self._undoing.append((undo, check))

    def undo(self, mark: Mark | None = None) -> None:
        """Everything, or what came after the mark; nothing at all where some of it cannot be."""
        to = mark or Mark(0, 0, 0)
        asked: set[tuple[int, str]] = set()
        for _, check in reversed(self._undoing if mark is None else []):
            if check is not None:
                check(asked)
        while len(self._undoing) > to.undoing:
            self._undoing.pop()[0]()
        del self.changes[to.changes :], self.uses[to.uses :]


class Mark:
    """A moment in a journal."""

    def __init__(self, uses: int, changes: int, undoing: int) -> None:
        self.uses, self.changes, self.undoing = uses, changes, undoing


def _copied(uses: tuple[FixUse, ...], changes: tuple[Change, ...]) -> Journal:
    made = Journal()
    made.uses, made.changes, made.is_a_copy = list(uses), list(changes), True
    return made


def _brought_along(before: Any, now: Any) -> Any:
    """A tensor that was put aside, where its stand-in is now: the model may have been moved meanwhile."""
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        dtype = now.dtype if before.is_floating_point() and now.is_floating_point() else before.dtype
        if (before.device, before.dtype) != (now.device, dtype):
            before.data = before.data.to(now.device, dtype)
    return before


def _slots(owner: Any, name: str) -> dict[str, Any]:
    """The dictionary that holds the attribute. Setting it there keeps its place among the others."""
    if isinstance(owner, nn.Module):
        for slots in (owner._parameters, owner._buffers, owner._modules):
            if name in slots:
                return slots  # type: ignore[return-value]
    return vars(owner)
