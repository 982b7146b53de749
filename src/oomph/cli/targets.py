"""TARGET on the command line: `file.py:name` or `package.module:name`, found and imported; or a config."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from oomph.cli.config_targets import check_overrides, is_config, open_config
from oomph.cli.failures import origin, program_error
from oomph.cli.workloads import resized, sizes_from_words, workload_of
from oomph.errors import OomphError, ProgramError, UserError

if TYPE_CHECKING:
    from oomph.workload import Workload

VALID = (
    "give file.py:name or package.module:name, where name is a Workload, a function that returns one, "
    "or a function that sets up and returns the step; or a config, e.g. configs/pythia_70m.yaml"
)


def check_target(target: str, overrides: Sequence[str] = ()) -> None:
    """Mistakes that can be seen at once, before seconds go into importing torch."""
    if not is_config(target):
        split_target(target)
    check_overrides(target, overrides)


@contextmanager
def open_target(target: str, overrides: Sequence[str] = ()) -> Iterator[Workload | Callable[[], Any]]:
    """The object that `target` names, or the step of a config with its overrides.

    The import path stays as the program expects it until the block ends, since models are built, and
    modules often imported, only while the step is traced; then it is put back.
    """
    check_overrides(target, overrides)
    if is_config(target):
        yield open_config(target, overrides)
        return
    source, name = split_target(target)
    path, modules = list(sys.path), set(sys.modules)
    try:
        found = check_object(find_name(_import(source), name, source), target)
        sizes = sizes_from_words(overrides, target)
        yield resized(workload_of(found, target), sizes) if sizes else found
    finally:
        sys.path[:] = path
        if is_file(source):
            # Only the file's own name is ours to take back; what it imported belongs to the process.
            for taken in _module_names(source):
                if taken not in modules:
                    sys.modules.pop(taken, None)


@contextmanager
def _cuda_seems_available() -> Iterator[None]:
    """Many programs choose their device when they are imported; they are predicted for a GPU."""
    import torch
    from torch.utils import _triton

    # Remembered: asked while a GPU only seems to be there, it would look for the device itself.
    _triton.has_triton()
    answer = torch.cuda.is_available
    torch.cuda.is_available = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = answer


def split_target(target: str) -> tuple[str, str]:
    """("file.py", "name"); anything else is the user's mistake."""
    source, colon, name = target.rpartition(":")
    if not colon:
        if target.endswith(".py"):
            raise UserError(f"target {target!r} is a whole script, which oomph cannot predict yet; {VALID}")
        raise UserError(f"target {target!r} has no colon; {VALID}")
    if not source or not name.isidentifier():
        raise UserError(f"target {target!r} is not valid; {VALID}")
    return source, name


def is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def find_name(module: ModuleType, name: str, source: str) -> Any:
    """`module.name`, or a UserError with the nearest names."""
    try:
        return getattr(module, name)
    except AttributeError:
        pass
    public = [
        known
        for known, value in vars(module).items()
        if not known.startswith("_") and not inspect.ismodule(value) and not inspect.isclass(value)
    ]
    close = difflib.get_close_matches(name, public, n=3)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        own = [known for known in public if _is_own(vars(module)[known], module)]
        hint = f"it defines {', '.join(own[:8])}" if own else "it defines nothing that could be a target"
    raise UserError(f"{source} has no {name!r}; {hint}")


def check_object(found: Any, target: str) -> Workload | Callable[[], Any]:
    """`found` itself, if it is a Workload or a function that can be called without arguments."""
    from torch import nn

    from oomph.workload import Workload

    if isinstance(found, Workload):
        return found
    if isinstance(found, nn.Module):
        given = f"a model ({type(found).__name__})"
    elif inspect.isclass(found):
        given = f"the class {found.__name__}"
    elif not callable(found):
        given = f"a value of type {type(found).__name__}"
    else:
        required = _required_arguments(found)
        if not required:
            return found
        given = f"a function that needs arguments ({', '.join(required)})"
    wanted = "give a Workload, or a function of no arguments that returns one"
    raise UserError(f"target {target!r} is {given}; {wanted}")


def _import(source: str) -> ModuleType:
    return _import_file(source) if is_file(source) else _import_module(source)


def _import_file(source: str) -> ModuleType:
    path = Path(source).resolve()
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"file {source!r} {what}{_nearest_file(path)}; {VALID}")
    if path.suffix != ".py":
        raise UserError(f"file {source!r} is not a Python file; {VALID}")
    sys.path.insert(0, str(path.parent))  # as `python file.py` does
    # The file's own name lets its neighbours import it back; a name in use must not be overwritten.
    name = next(name for name in _module_names(source) if name not in sys.modules)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _as_program_error(source), _cuda_seems_available():
            spec.loader.exec_module(module)
    except ProgramError:
        sys.modules.pop(name, None)
        raise
    return module


def _import_module(source: str) -> ModuleType:
    if not all(part.isidentifier() for part in source.split(".")):
        raise UserError(f"module {source!r} is not a valid module name; {VALID}")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    with _as_program_error(source), _cuda_seems_available():
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            # Missing is the module asked for, or a package on the way to it; else the program misses one.
            if error.name is None or not f"{source}.".startswith(f"{error.name}."):
                raise
            missing = error.name
    inside = "" if missing == source else f" (there is no {missing!r})"
    raise UserError(f"module {source!r} was not found{inside}; {VALID}")


@contextmanager
def _as_program_error(source: str) -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise ProgramError(
            f"{source} ends the process while it is imported (SystemExit: {error.code})"
        ) from error
    except OomphError as error:
        # A Workload refuses bad arguments where it is made: say where that is.
        where = origin(error)
        raise type(error)(f"{where}: {error}" if where else str(error)) from error
    except Exception as error:
        raise program_error(error) from error


def _module_names(source: str) -> tuple[str, str]:
    stem = Path(source).stem
    return stem, f"{stem} (oomph target)"


def _nearest_file(path: Path) -> str:
    folder = path.parent
    names = [one.name for one in folder.glob("*.py")] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _is_own(value: Any, module: ModuleType) -> bool:
    """A function written in the module, or a Workload."""
    return getattr(value, "__module__", None) in (module.__name__, "oomph.workload")


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-ins have no signature; calling them will tell
        return []
    by_value = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [one.name for one in parameters if one.default is one.empty and one.kind in by_value]
