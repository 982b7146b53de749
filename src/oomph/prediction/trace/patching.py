"""Changes to torch that last exactly as long as a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Patches:
    """Attributes replaced one after the other, and put back in reverse order, whatever happened between."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name`. What the owner merely inherits is removed again, not frozen in."""
        if name in vars(owner):
            self._stack.callback(setattr, owner, name, vars(owner)[name])
        else:
            self._stack.callback(delattr, owner, name)
        setattr(owner, name, value)

    def callback(self, undo: Callable[[], Any]) -> None:
        """Call `undo` in its turn on exit."""
        self._stack.callback(undo)

    def __enter__(self) -> Patches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
