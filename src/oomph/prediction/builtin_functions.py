"""Functions in Python that look like the builtin functions which they replace.

Programs compare `type(open)` with `type(print)`, pickle functions of os and inspect their signatures. A
builtin_function_or_method calls a function in C: here PyObject_Call, with a callable of ours as its `self`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import BuiltinFunctionType, ModuleType
from typing import Any


class _MethodDefinition(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("documentation", ctypes.c_char_p),
    )


class _Module(ModuleType):
    """A builtin function's `self` is its module: by that it is printed and pickled."""

    def __init__(self, instead_of: Any, function: Callable[..., Any]) -> None:
        super().__init__(instead_of.__module__)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


_POSITIONAL, _KEYWORDS = 0x0001, 0x0002  # METH_VARARGS, METH_KEYWORDS
_definitions: list[_MethodDefinition] = []  # which the functions refer to


def as_builtin(function: Callable[..., Any], instead_of: Any) -> Any:
    """A builtin function with the name, module, signature and documentation of `instead_of`."""
    if not isinstance(instead_of, BuiltinFunctionType):
        return function
    python = ctypes.pythonapi
    name, text = instead_of.__name__, instead_of.__doc__ or ""
    if signature := getattr(instead_of, "__text_signature__", None):
        text = f"{name}{signature}\n--\n\n{text}"
    call = ctypes.cast(python.PyObject_Call, ctypes.c_void_p).value
    definition = _MethodDefinition(name.encode(), call, _POSITIONAL | _KEYWORDS, text.encode())
    _definitions.append(definition)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.py_object)(
        ("PyCFunction_NewEx", python)
    )
    return make(ctypes.addressof(definition), _Module(instead_of, function), instead_of.__module__)
