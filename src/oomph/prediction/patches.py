"""Attributes that are replaced while a program is predicted, and put back afterwards."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator
from importlib.abc import MetaPathFinder
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from oomph.torch_internals import check_attribute

_INHERITED = object()


class _ReplacedAttribute(NamedTuple):
    owner: Any
    name: str
    before: Any
    value: Any

    def undo(self) -> None:
        if self.before is _INHERITED:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class _ImportHook(MetaPathFinder):
    """Calls `imported` as soon as the program has imported a module."""

    def __init__(self, module: str, imported: Callable[[], None]) -> None:
        self._module, self._imported = module, imported
        self._asks_others = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Also called by programs that only ask whether the module is installed."""
        if name != self._module or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks_others = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: Any) -> None:
            self.remove()
            execute(module)
            self._imported()

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


def _named_as(before: FunctionType, value: FunctionType) -> FunctionType:
    """A copy of a function that looks like another: the same function may replace several."""
    made = FunctionType(value.__code__, value.__globals__, "", value.__defaults__, value.__closure__)
    made.__kwdefaults__ = value.__kwdefaults__
    made.__dict__.update(value.__dict__)
    functools.update_wrapper(made, before, updated=())
    return made


class Patches(contextlib.ExitStack):
    """Attributes replaced one after the other, and put back in reverse order, whatever happened between."""

    def __init__(self) -> None:
        super().__init__()
        self._replaced: list[_ReplacedAttribute] = []
        self._named: dict[tuple[Any, str, str], Any] = {}

    def set(self, owner: Any, name: str, value: Any, missing_ok: bool = False) -> None:
        """Replace `owner.name`, which must exist. An inherited attribute is removed again, not frozen in.

        A function gets the name, the module and the signature of the one that it replaces.
        """
        if not missing_ok:
            check_attribute(owner, name)
        before = vars(owner).get(name, _INHERITED)
        if isinstance(value, FunctionType) and isinstance(before, FunctionType):
            # A function that stands in several modules is one object in all.
            key = value, before.__module__, before.__qualname__
            value = self._named.setdefault(key, _named_as(before, value))
        replaced = _ReplacedAttribute(owner, name, before, value)
        self.callback(replaced.undo)
        self._replaced.append(replaced)
        setattr(owner, name, value)

    def when_imported(self, module: str, imported: Callable[[], None]) -> None:
        """Call `imported` now, or once the program has imported a module that few programs use."""
        if module in sys.modules:
            imported()
        else:
            hook = _ImportHook(module, imported)
            sys.meta_path.insert(0, hook)
            self.callback(hook.remove)

    def has_replaced(self, value: Any) -> bool:
        """Whether a function, its code or a class is what an attribute was before."""
        before = [each.before for each in self._replaced]
        if isinstance(value, CodeType):
            return any(getattr(each, "__code__", None) is value for each in before)
        return callable(value) and any(each is value for each in before)

    @contextlib.contextmanager
    def suspended(self, keep: Collection[Any]) -> Iterator[None]:
        """Put the attributes of all owners but `keep` back for the duration."""
        suspended = [each for each in self._replaced if each.owner not in keep]
        values = [vars(each.owner).get(each.name, each.value) for each in suspended]
        for each in reversed(suspended):
            each.undo()
        try:
            yield
        finally:
            for each, value in zip(suspended, values, strict=True):
                setattr(each.owner, each.name, value)
