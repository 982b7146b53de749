"""Which line of the user's own source is running now."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from oomph.records import Site

# Frames that only carry a call through: what the reader wants is the line that called them.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_TRACER = str(Path(__file__).parent.parent) + os.sep
_PACKAGE = Path(__file__).parent.parent.parent
_WORKLOAD = str(_PACKAGE / "workload.py")
_OWN_OPS = tuple(str(_PACKAGE / room) + os.sep for room in ("ops", "nn", "fixes"))
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_CARRIERS = ("einops", "typing_extensions", "jaxtyping", "beartype", "opt_einsum", "triton")


@lru_cache(maxsize=4096)
def is_internal(filename: str) -> bool:
    carried = (_TORCH, _TRACER, *_OWN_OPS, "<frozen", "<__array_function__")
    if filename.startswith(carried) or filename == _WORKLOAD:
        return True
    if "site-packages" in filename:
        package = filename.rsplit("site-packages", 1)[1].split("/", 2)[1:2]
        return bool(package) and package[0] in _CARRIERS
    return filename.startswith(_STANDARD_LIBRARY)


class Boundary:
    """Code objects at which the walk up the stack ends: beyond them it is no longer the user's program."""

    def __init__(self) -> None:
        self.engine: set[CodeType] = set()  # autograd's engine was called from here
        self.outside: set[CodeType] = set()  # the trace was started from here
        self.module_call: CodeType | None = None  # a module was called from here


def find_site(boundary: Boundary, depth: int = 1) -> tuple[Site | None, bool]:
    """The innermost user line, and whether the walk ended at the autograd engine without finding one."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if code in boundary.engine:
            return None, True
        if code in boundary.outside:
            return None, False
        if not is_internal(code.co_filename):
            return _site(code.co_filename, frame.f_lineno, code.co_qualname), False
        frame = frame.f_back
    return None, False


def in_own_code(depth: int = 1) -> bool:
    """Whether the call comes from an op or a fix of oomph's, past what only carries it through."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN_OPS):
            return True
        if not is_internal(file):
            return False
        frame = frame.f_back
    return False


def in_loss_function(boundary: Boundary, depth: int = 1) -> bool:
    """Whether a function that calls itself a loss is running, inside the innermost module if there is one."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if code in boundary.engine or code in boundary.outside or code is boundary.module_call:
            return False
        if _names_a_loss(code.co_name):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=4096)
def _names_a_loss(name: str) -> bool:
    name = name.lower()
    return "loss" in name or "criterion" in name or "cross_entropy" in name


@lru_cache(maxsize=65536)
def _site(file: str, line: int, function: str) -> Site:
    return Site(file, line, function.replace("<locals>.", ""))
