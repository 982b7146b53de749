"""Finds the lines that keep tensors of earlier steps or calls alive, such as `history.append(loss)`.

Whenever the program calls a model, goes backward or has updated its parameters, its own frames are on the
stack. If tensors of earlier steps are alive then, the variables of those frames are searched for them, and
the source of the frame's file for the statement that adds to the variable.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oomph.prediction.tracer.attribution import is_internal
from oomph.records import Holder, Site
from oomph.torch_internals import FakeTensor

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer

_LEAST_BYTES = 1 << 20  # less is not worth a search
_DEEPEST = 3  # containers and objects inside of others
_MOST_PARTS = 4096  # of one container
_ADDS = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class _Held:
    """What one variable or attribute holds, directly or in containers."""

    ids: set[int] = field(default_factory=set)
    graph: bool = False
    recurrent: bool = False


class _Statement(NamedTuple):
    line: int
    function: str
    recurrent: bool


class HolderSearch:
    """Searches again only after the retained bytes have grown by half, so that few searches are made."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._searched_at = 0
        self._next_call = 2
        self._found: dict[Site, _Held] = {}

    def before_call(self) -> None:
        """Of a model: loops call one thousands of times, so fewer and fewer calls are looked at."""
        calls = self._tracer.modules.completed
        if calls >= self._next_call:
            self._next_call = calls + calls // 4 + 1
            self()

    def __call__(self) -> None:
        self._tracer.guard.call("lines that keep tensors", "a program", self._search, lambda: None)

    def found(self) -> tuple[Holder, ...]:
        """Those that hold most come first."""
        sizes = self._tracer.recorder.allocations
        holders = [
            Holder(site, frozenset(held.ids), held.graph, held.recurrent)
            for site, held in self._found.items()
        ]
        return tuple(sorted(holders, key=lambda one: -sum(sizes[id].bytes for id in one.ids)))

    def _search(self) -> None:
        retained = self._retained()
        size = sum(retained.values())
        if size < max(_LEAST_BYTES, self._searched_at * 3 // 2):
            return
        self._searched_at = size
        for frame in self._program_frames():
            for name, value, file in _variables(frame):
                held = _Held()
                self._collect(value, retained, held, 0)
                if held.ids or held.graph:
                    self._add(held, _statement_that_adds(file, name, frame), file)

    def _add(self, held: _Held, statement: _Statement | None, file: str) -> None:
        if statement is not None:
            known = self._found.setdefault(Site(file, statement.line, statement.function), _Held())
            known.ids |= held.ids
            known.graph |= held.graph
            known.recurrent = statement.recurrent

    def _retained(self) -> dict[int, int]:
        """Activations of earlier steps, and of calls before the last: id -> bytes. Gradients, too, of which
        containers may hold copies."""
        step, call = self._tracer.step, self._tracer.modules.completed
        return {
            one.id: one.bytes
            for one in self._tracer.recorder.live_allocations()
            if one.kind in ("activation", "temporary", "gradient")
            and (0 < one.step < step or (one.call < call - 1 and one.kind != "gradient"))
        }

    def _program_frames(self) -> Iterator[FrameType]:
        boundary = self._tracer.boundary
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in boundary.outside:
            if not is_internal(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def _collect(self, value: Any, retained: Mapping[int, int], held: _Held, depth: int) -> None:
        if isinstance(value, FakeTensor):
            allocation = self._tracer.recorder.allocation_of(value)
            if allocation is not None and allocation.id in retained:
                held.ids.add(allocation.id)
            held.graph |= value.grad_fn is not None
        elif depth < _DEEPEST:
            for part in _parts(value):
                self._collect(part, retained, held, depth + 1)


def _variables(frame: FrameType) -> Iterator[tuple[str, Any, str]]:
    """Name, value and file of locals, globals, and attributes of the program's objects."""
    file = frame.f_code.co_filename
    scopes = [frame.f_globals]
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # of a function
        scopes.append(_locals(frame))
    for scope in scopes:
        for name, value in list(scope.items()):
            if isinstance(value, (torch.Tensor, list, tuple, dict, set)) or hasattr(
                type(value), "appendleft"
            ):
                yield name, value, file
            elif (home := _home(value)) is not None:
                for attribute, part in list(vars(value).items()):
                    yield attribute, part, home


def _locals(frame: FrameType) -> dict[str, Any]:
    """A copy. Before Python 3.13 a frame keeps what it once gave out, and tensors with it."""
    kept = frame.f_locals
    found = dict(kept)
    if sys.version_info < (3, 13):
        kept.clear()
    return found


def _home(value: Any) -> str | None:
    """The file of the program that defines the object's class."""
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return None
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return file if file is not None and not is_internal(file) else None


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())[:_MOST_PARTS]
    if isinstance(value, (list, tuple, set)) or hasattr(type(value), "appendleft"):
        return list(value)[:_MOST_PARTS]
    return ()


def _statement_that_adds(file: str, name: str, frame: FrameType) -> _Statement | None:
    """`name.append(...)`, `name += ...`, `name[...] = ...`, `name = f(name)`, `name = [... for ...]`.

    Of several, the one in the frame's own function.
    """
    statements = _additions(file).get(name, ())
    own = range(frame.f_code.co_firstlineno, _last_line(frame.f_code) + 1)
    return next((one for one in statements if one.line in own), statements[0] if statements else None)


def _last_line(code: CodeType) -> int:
    return max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)


@lru_cache(maxsize=256)
def _additions(file: str) -> dict[str, list[_Statement]]:
    """Variable or attribute -> the statements that add to it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, list[_Statement]] = {}

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            for name, recurrent in _added_to(child):
                statement = _Statement(child.lineno, inside, recurrent)  # type: ignore[attr-defined]
                found.setdefault(name, []).append(statement)
            visit(child, inside)

    visit(tree, "<module>")
    return found


def _added_to(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names that the statement adds to, and whether it computes their next value from the last."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDS:
        yield from ((name, False) for name in _name(node.func.value))
    elif isinstance(node, ast.AugAssign):
        yield from ((name, False) for name in _name(node.target))
    elif isinstance(node, ast.Assign):
        used = {name for part in ast.walk(node.value) for name in _name(part)}
        sums = isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Add)
        joins = isinstance(node.value, ast.Call) and "cat" in ast.unparse(node.value.func)
        for target in node.targets:
            for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                for name in _name(part):
                    if isinstance(part, ast.Subscript) or name in used:
                        yield name, not (sums or joins or isinstance(part, ast.Subscript))
                    elif isinstance(node.value, _COMPREHENSIONS):
                        yield name, False


def _name(node: ast.AST) -> Iterator[str]:
    """`x`, `self.x`, `x["key"]`: x."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
