"""IPython: what notebooks import of it, where it is not installed, and bars without widgets.

Not a Library: only notebooks need it, on a real GPU, too (prediction/notebook.py).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def stand_in() -> None:
    if importlib.util.find_spec("IPython") is None:
        # Any name of IPython.display: display, HTML, Image, clear_output, ...
        display = _module("IPython.display", __getattr__=_shown)
        _module("IPython", __path__=[], display=display, get_ipython=lambda: None, version_info=(9, 0, 0, ""))
    has_bars = importlib.util.find_spec("tqdm") is not None
    if has_bars and importlib.util.find_spec("ipywidgets") is None:
        from tqdm.std import tqdm, trange

        _module("tqdm.notebook", tqdm=tqdm, tqdm_notebook=tqdm, trange=trange, tnrange=trange)


def _module(name: str, **names: Any) -> ModuleType:
    found = sys.modules[name] = ModuleType(name)
    found.__spec__ = ModuleSpec(name, None)  # for those that ask whether it is there
    vars(found).update(names)
    return found


def _shown(name: str) -> type[_Shown]:
    if name.startswith("__"):  # __file__, by which inspect would know it
        raise AttributeError(name)
    return _Shown


class _Shown:
    """Any class or function of IPython.display: what it is given is not shown."""

    def __init__(self, *values: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _shown(name)
