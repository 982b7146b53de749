"""A package `triton` for machines without one, while the compiler runs.

Inductor and the programs that it generates import Triton; the trace launches no kernel. Modules and classes
here are empty. A program that is predicted does not find them.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_VERSION = "3.6.0"  # that of the oldest torch release that oomph supports


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Empty(type):
    """A class that has every attribute, and whose instances do nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Empty(name, (), {"__module__": cls.__module__, "__init__": _nothing})
        setattr(cls, name, made)
        return made


class _Module(ModuleType):
    __version__ = _VERSION

    @staticmethod
    def triton_key() -> str:
        return _VERSION

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Empty(name, (), {"__module__": self.__name__, "__init__": _nothing})
        setattr(self, name, made)
        return made


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "triton":
            return None
        loader: Any = self
        return importlib.machinery.ModuleSpec(name, loader, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


_finder: Any = _Finder()
_modules: dict[str, ModuleType] = {}


@contextlib.contextmanager
def triton_importable() -> Iterator[None]:
    """For as long as it lasts, where Triton is not installed."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        yield
        return
    sys.modules.update(_modules)
    sys.meta_path.insert(0, _finder)
    try:
        yield
    finally:
        sys.meta_path.remove(_finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            _modules[name] = sys.modules.pop(name)
