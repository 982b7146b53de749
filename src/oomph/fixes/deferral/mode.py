"""The mode that both kinds of deferral are: deferred arguments first, then the calls that it looks at."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from oomph.fixes.deferral.deferred import Options, call, deferred_in, is_in_place_by_name
from oomph.fixes.deferral.mode_stack import DeferringMode


class CallsMode(DeferringMode):
    looked_at: ClassVar[frozenset[str]]  # names of functions that `handled` wants to see

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Options | None = None
    ) -> Any:
        # Every call and every question of a shape comes here: those of no interest have to leave soon.
        if types and deferred_in(args, kwargs or {}):
            return call(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if not kwargs:
            return self.handled(name, func, args, {}) if _matters(self.looked_at, name) else func(*args)
        if _matters(self.looked_at, name) or "out" in kwargs:
            return self.handled(name, func, args, kwargs)
        return func(*args, **kwargs)

    def handled(self, name: str, func: Any, args: Sequence[Any], kwargs: Options) -> Any:
        """A call of `looked_at`, or one that may change something in place."""
        return func(*args, **kwargs)


@functools.cache
def _matters(looked_at: frozenset[str], name: str) -> bool:
    return name in looked_at or is_in_place_by_name(name)
