"""What a user's function returned: the step of its training, a result of what it did, or a mistake."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import torch

from oomph.errors import UserError
from oomph.workload import Workload

_DEEPEST = 4  # collections in collections; some hold themselves
VALID = (
    "return a function of no arguments that does one training step, or a Workload; "
    "or do the training inside and return nothing"
)


def is_step(result: Any) -> bool:
    """Models, tensors and classes can be called, but calling them is no training step."""
    return callable(result) and not isinstance(result, (torch.nn.Module, torch.Tensor, type))


def check_step(step: Callable[[], Any], function: str) -> None:
    """A step that needs arguments is told at once; torch would only say that it misses one."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # some built-ins have no signature; calling them will tell
        return
    given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in parameters if one.default is one.empty and one.kind not in given]
    if needed:
        raise UserError(
            f"{function} returned {described(step)}, which needs arguments ({', '.join(needed)}); {VALID}"
        )


def check_result(result: Any, function: str) -> None:
    """Of a function that trained nothing: what it returned must be the outcome of what it did."""
    made_by_calling = inspect.isgenerator(result) or inspect.iscoroutine(result)
    if made_by_calling:
        result.close()  # it will not be run; left alone it would complain
    if made_by_calling or not _is_outcome(result):
        raise UserError(f"{function} returned {described(result)}, and no training step was traced; {VALID}")


def name_of(function: Callable[..., Any]) -> str:
    """`setup()`"""
    name = getattr(function, "__name__", type(function).__name__)
    return "the function" if name == "<lambda>" else f"{name}()"


def described(value: Any, depth: int = 0) -> str:
    """`a model (GPT2)`, `a tuple of a model (GPT2) and a function (step)`"""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.nn.Module):
        return f"a model ({type(value).__name__})"
    if isinstance(value, torch.optim.Optimizer):
        return f"an optimizer ({type(value).__name__})"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, Workload):
        return "a Workload"
    if isinstance(value, str):
        return "a string"
    if inspect.isroutine(value):
        return "a function" if value.__name__ == "<lambda>" else f"a function ({value.__name__})"
    if type(value) in (tuple, list, dict) and depth < _DEEPEST:
        parts = [
            described(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)
        ]
        return f"a {type(value).__name__}{_listed(parts)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _listed(parts: list[str], most: int = 4) -> str:
    if not parts:
        return ", empty"
    if len(parts) > most:
        parts = [*parts[: most - 1], f"{len(parts) - most + 1} more"]
    return f" of {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}"


def _is_outcome(result: Any) -> bool:
    """Nothing, numbers, words, tensors, and collections with nothing in them that could still be trained."""
    if isinstance(result, numbers.Number | str | bytes | PurePath | None) or hasattr(
        type(result), "__array__"
    ):
        return True
    parts = _parts(result)
    return parts is not None and not any(map(_to_be_trained, parts))


def _to_be_trained(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, Workload)):
        return True
    parts = _parts(value) if depth < _DEEPEST else None
    return is_step(value) if parts is None else any(_to_be_trained(part, depth + 1) for part in parts)


def _parts(value: Any) -> Iterator[Any] | None:
    if isinstance(value, Mapping):
        return iter(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return iter(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name, None) for field in dataclasses.fields(value))
    return None
