"""Names that a package offers without importing their modules before one is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, homes: Mapping[str, Collection[str]], submodules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package.

    `homes`: submodule -> the names it gives the package; `submodules`: those offered as they are.
    Type checkers do not look in here: the package imports the same names under TYPE_CHECKING.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")  # which makes it an attribute of the package
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(import_module(f"{package}.{home_of[name]}"), name)
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *home_of, *submodules})

    return get, list_names
