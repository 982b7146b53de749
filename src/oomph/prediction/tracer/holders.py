"""What keeps tensors of earlier steps alive, such as `history.append(loss)`.

Whenever the program calls a model, goes backward or has updated its parameters, its own frames are on the
stack. If tensors of earlier steps are alive then, the variables of those frames are searched for them, and
the source of the frame's file for the statement that adds to the variable.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from oomph.prediction.ops.rules import RuleGuard
from oomph.prediction.tracer.attribution import ModuleStack, StackBoundary, is_internal
from oomph.prediction.tracer.recorder import AllocationRecorder
from oomph.records import Holder, Site
from oomph.torch_internals import FakeTensor

_LEAST_BYTES = 1 << 20  # less is not worth a search
_MOST_VISITED = 50_000  # objects, in one search
_MOST_PARTS = 4096  # of one container
_FIRST_PARTS = 64  # where these are numbers or text, so are the others
_PLAIN = (bool, int, float, str, bytes, type(None))
_ADDS = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(slots=True)
class _Held:
    """What one variable or attribute holds, directly or in containers."""

    ids: set[int] = field(default_factory=set)
    graph: bool = False
    recurrent: bool = False
    loops: bool = False


class _Statement(NamedTuple):
    line: int
    function: str
    recurrent: bool
    loops: bool


class _Visited(NamedTuple):
    value: Any
    name: str  # of the variable or the attribute that holds it
    file: str  # with the statements that may add to that
    frame: int  # the innermost that has it
    inside: bool = False  # of a container


class HolderSearch:
    """Searches again only after the retained bytes have grown by half, so that few searches are made."""

    def __init__(
        self,
        recorder: AllocationRecorder,
        modules: ModuleStack,
        boundary: StackBoundary,
        guard: RuleGuard,
        step: Callable[[], int],
        label_parameters: Callable[[], None],
    ) -> None:
        self._recorder, self._modules, self._boundary, self._guard = recorder, modules, boundary, guard
        self._step, self._label_parameters = step, label_parameters
        self._searched_at = 0
        self._next_call = 0
        self._found: dict[Site, _Held] = {}

    def before_call(self) -> None:
        """Of a model: loops call one thousands of times, so fewer and fewer calls are looked at."""
        calls = self._modules.completed
        if calls >= self._next_call:
            self._next_call = calls + calls // 4 + 1
            self._label_parameters()  # inference has no backward pass, and may free its model
            self()

    def __call__(self) -> None:
        self._guard.call("lines that keep tensors", "a program", self._search, lambda: None)

    def found(self) -> tuple[Holder, ...]:
        """Those that hold most come first."""
        sizes = self._recorder.allocations
        holders = [
            Holder(site, frozenset(held.ids), held.graph, held.recurrent, held.loops)
            for site, held in self._found.items()
        ]
        return tuple(sorted(holders, key=lambda one: -sum(sizes[id].bytes for id in one.ids)))

    def _search(self) -> None:
        retained = self._retained()
        size = sum(retained.values())
        if size < max(_LEAST_BYTES, self._searched_at * 3 // 2):
            return
        self._searched_at = size
        frames = list(self._program_frames())
        held: dict[tuple[str, str, int], _Held] = {}
        for tensor, name, file, frame, _ in _tensors(frames):
            one = held.setdefault((name, file, frame), _Held())
            allocation = self._recorder.allocation_of(tensor)
            if allocation is not None and allocation.id in retained:
                one.ids.add(allocation.id)
            one.graph |= tensor.grad_fn is not None
        for (name, file, frame), one in held.items():
            statement = _statement_that_adds(file, name, frames[frame:]) if one.ids or one.graph else None
            if statement is not None:
                known = self._found.setdefault(Site(file, statement.line, statement.function), _Held())
                known.ids |= one.ids
                known.graph |= one.graph
                known.recurrent, known.loops = statement.recurrent, statement.loops

    def _retained(self) -> dict[int, int]:
        """Activations of earlier steps, and of calls before the last: id -> bytes. Gradients, too, of which
        containers may hold copies; and batches and parameters that steps after the first made."""
        step, call = self._step(), self._modules.completed
        return {
            one.id: one.bytes
            for one in self._recorder.live_allocations()
            if (one.kind in ("activation", "temporary", "gradient") and 0 < one.step < step)
            or (one.kind in ("activation", "temporary") and one.call < call - 1)
            or (one.kind in ("batch", "parameter") and 1 < one.step < step)
        }

    def _program_frames(self) -> Iterator[FrameType]:
        boundary = self._boundary
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in boundary.outside:
            if not is_internal(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back


def _tensors(frames: Sequence[FrameType]) -> Iterator[_Visited]:
    """Of locals, then of globals: attributes of the program's objects, and containers. What frames have
    themselves comes before what is deep inside of a data set."""
    seen: set[tuple[int, str]] = set()
    for scope_of in (_locals, operator.attrgetter("f_globals")):
        visited = [
            _Visited(value, name, frame.f_code.co_filename, number)
            for number, frame in enumerate(frames)
            for name, value in list(scope_of(frame).items())
        ]
        for one in visited:
            key = id(one.value), one.name
            if isinstance(one.value, FakeTensor):
                yield one
            elif key not in seen and len(visited) < _MOST_VISITED:
                seen.add(key)
                visited += _parts(one)


def _locals(frame: FrameType) -> dict[str, Any]:
    """Of a function: a copy. Before Python 3.13 a frame keeps what it once gave out, and tensors with it."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return {}
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


def _parts(one: _Visited) -> list[_Visited]:
    """Attributes of an object have names of their own, but for objects in containers."""
    value = one.value
    if isinstance(value, (dict, list, tuple, set)) or hasattr(type(value), "appendleft"):
        elements: Iterable[Any] = value.values() if isinstance(value, dict) else value
        if all(isinstance(each, _PLAIN) for each in itertools.islice(elements, _FIRST_PARTS)):
            return []
        return [one._replace(value=each, inside=True) for each in [*itertools.islice(elements, _MOST_PARTS)]]
    home = _home(value)
    if home is None or (one.inside and isinstance(value, nn.Module)):
        return []
    attributes = list(vars(value).items())
    if one.inside:
        return [one._replace(value=part) for _, part in attributes]
    return [_Visited(part, name, home, one.frame) for name, part in attributes]


def _statement_that_adds(file: str, name: str, frames: Iterable[FrameType]) -> _Statement | None:
    """`name.append(...)`, `name += ...`, `name[...] = ...`, `name = f(name)`, `name = [... for ...]`.

    Of several, the one in the innermost of these frames that has one.
    """
    statements = _additions(file).get(name, ())
    own = (_lines(frame.f_code) for frame in frames if frame.f_code.co_filename == file)
    found = (one for lines in own for one in statements if one.line in lines)
    return next(itertools.chain(found, statements), None)


def _lines(code: CodeType) -> range:
    last = max((line for *_, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    return range(code.co_firstlineno, last + 1)


@lru_cache(maxsize=256)
def _additions(file: str) -> dict[str, list[_Statement]]:
    """Variable or attribute -> the statements that add to it."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, list[_Statement]] = {}

    def visit(node: ast.AST, function: str, loops: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside, repeats = function, loops
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside, repeats = child.name, False
            elif isinstance(child, (ast.For, ast.While)) or isinstance(
                getattr(child, "value", None), _COMPREHENSIONS
            ):
                repeats = "backward(" not in ast.unparse(child)
            for name, recurrent in _added_to(child):
                statement = _Statement(child.lineno, inside, recurrent, repeats)  # type: ignore[attr-defined]
                found.setdefault(name, []).append(statement)
            visit(child, inside, repeats)

    visit(tree, "<module>", False)
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
