"""TorchScript: what a program scripts or traces runs as the Python that it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from oomph.errors import UserError
from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches
from oomph.prediction.saving import is_without_data

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer

_NOTE = "torch.jit is traced as eager: fused kernels may need less memory"


def _run_as_python(patches: Patches, tracer: Tracer) -> None:
    compile_script: Any = torch.jit.script

    def script(program: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        """Names of the program are looked up in the frame that calls it, `_frames_up` above."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            # Formulas of torch's forward-mode gradients, functional optimizers of torch.distributed.
            return compile_script(program, *args, _frames_up=_frames_up + 1, **kwargs)
        if not inspect.isfunction(program):
            tracer.note(_NOTE)
            return with_save(program)

        # TorchScript reads the names now: a module may give them to others later.
        bound = FunctionType(program.__code__, {**program.__globals__}, closure=program.__closure__)
        bound.__defaults__, bound.__kwdefaults__ = program.__defaults__, program.__kwdefaults__

        @functools.wraps(program)
        def noted(*args: Any, **kwargs: Any) -> Any:  # a library scripts functions that a program never calls
            tracer.note_once(_NOTE)
            return bound(*args, **kwargs)

        return noted

    def with_save(program: Any) -> Any:
        if isinstance(program, nn.Module) and not hasattr(program, "save"):
            program.save = _Save(program)  # type: ignore[assignment]
        return program

    scripted = torch.jit.ScriptModule

    class OfScripts(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return super().__instancecheck__(instance) or isinstance(instance, scripted)

    class ScriptModule(nn.Module, metaclass=OfScripts):
        """What a program derives its modules from, instead of torch.jit.ScriptModule, which compiles them."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            tracer.note(_NOTE)

    def script_method(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except TypeError as error:  # TorchScript's torch.exp takes a number
                message = f"{method.__qualname__}, a torch.jit method, fails as eager: {error}"
                raise UserError(message) from error

        return run

    def trace(program: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Runs the program once, as torch does."""
        tracer.note(_NOTE)
        if example_inputs is not None:
            program(*(example_inputs if isinstance(example_inputs, (list, tuple)) else [example_inputs]))
        return with_save(program)

    patches.set(torch.jit, "script", script)
    patches.set(torch.jit, "script_method", script_method)
    patches.set(torch.jit, "ScriptModule", ScriptModule)
    patches.set(torch.jit, "trace", trace)
    _save_and_load(patches)


class _Save:
    """`save` of a module of torch.jit, which is traced as it was before it was compiled."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, f: Any, _extra_files: Any = None) -> None:
        torch.jit.save(self.module, f, _extra_files)


def _save_and_load(patches: Patches) -> None:
    """torch.jit writes and reads paths in C."""
    compiled, load_real = torch.jit.ScriptModule, torch.jit.load

    def save(m: Any, f: Any, _extra_files: Any = None) -> None:
        if isinstance(m, compiled):
            data = m.save_to_buffer(_extra_files=_extra_files)
            f.write(data) if hasattr(f, "write") else Path(f).write_bytes(data)
            return
        try:
            torch.save(m, f)
        except (AttributeError, pickle.PicklingError):  # of a class that pickle does not find
            torch.save(m.state_dict(), f)

    def load(f: Any, map_location: Any = None, _extra_files: Any = None, **kwargs: Any) -> Any:
        with contextlib.nullcontext(f) if hasattr(f, "read") else open(f, "rb") as file:
            if is_without_data(file):
                return torch.load(file, map_location)
        return load_real(f, map_location, _extra_files, **kwargs)

    patches.set(torch.jit, "save", save)
    patches.set(torch.jit, "load", load)


LIBRARY = Library("TorchScript", None, in_trace=_run_as_python)
