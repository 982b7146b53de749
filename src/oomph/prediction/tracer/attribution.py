"""Where an allocation comes from (its source line and module), and what keeps tensors of earlier steps alive,
such as `history.append(loss)`.

Whenever the program calls a model, goes backward or has updated its parameters, its own frames are on the
stack. If tensors of earlier steps are alive then, the variables of those frames are searched for them, and
the source of the frame's file for the statement that adds to the variable.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import linecache
import operator
import os
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from oomph.prediction.cuda.rules import RuleGuard
from oomph.prediction.tracer.fake_cuda import Patches
from oomph.records import Holder, Kind, Site
from oomph.torch_internals import FakeTensor, Loss

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


# Frames that only pass a call on: what the reader wants is the line that called them.
_TORCH = str(Path(torch.__file__).parent) + os.sep
_PREDICTION = str(Path(__file__).parent.parent) + os.sep
_PACKAGE = Path(__file__).parent.parent.parent
_WORKLOAD = str(_PACKAGE / "workload.py")
_OWN_OPS = tuple(str(_PACKAGE / package) + os.sep for package in ("ops", "nn", "fixes"))
_SHOWN_OPS = str(_PACKAGE / "ops" / "delta_attention" / "dense_scan.py")  # a report's code
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_CONFIG_NAMES = {
    "V": ("vocab_size", "n_vocab", "num_embeddings"),
    "d": ("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim"),
    "f": ("intermediate_size", "d_ff", "n_inner", "ffn_dim"),
    "H": ("num_attention_heads", "n_heads", "n_head", "num_heads", "heads"),
    "dk": ("head_dim", "dim_head"),
}
_FEW_CALLS = 3  # of a module in one forward pass; more are a loop
_PASS_THROUGH_LIBRARIES = ("einops", "typing_extensions", "jaxtyping", "beartype", "opt_einsum", "triton")
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # attributes of wrappers


@lru_cache(maxsize=4096)
def is_internal(filename: str) -> bool:
    """Whether the file is not the user's: torch, oomph, the standard library, wrapper libraries."""
    if filename == _SHOWN_OPS:
        return False
    if filename.startswith((_TORCH, _PREDICTION, *_OWN_OPS, "<frozen", "<__array_function__")):
        return True
    if filename == _WORKLOAD:
        return True
    if "site-packages" in filename:
        package = filename.rsplit("site-packages", 1)[1].split("/", 2)[1:2]
        return bool(package) and package[0] in _PASS_THROUGH_LIBRARIES
    return filename.startswith(_STANDARD_LIBRARY)


@dataclass(frozen=True, slots=True)
class CompiledSite(Site):
    """The line that a part of a compiled graph comes from, with what only the compiler knows of it."""

    module: str  # its path inside the compiled module
    op: str
    is_loss: bool

    def plain(self) -> Site:
        return Site(self.file, self.line, self.function)


class _Code(NamedTuple):
    """What a frame with this code means to the walk up the stack."""

    ends: Literal["engine", "outside", "user", "compiled"] | None
    ends_loss: bool  # a loss's function that is further up is not the innermost module's
    is_loss: bool


class StackBoundary:
    """Code objects at which the walk up the stack ends: beyond them is not the user's program."""

    def __init__(self) -> None:
        self.engine: set[CodeType] = set()  # autograd's engine was called from here
        self.outside: set[CodeType] = set()  # the trace was started from here
        self.module_call: CodeType | None = None  # a module was called from here
        # of a program that the compiler generated, with the site of each line
        self.compiled: dict[CodeType, Callable[[int], CompiledSite | None]] = {}
        # By file and qualified name: to hash a code object takes long, and so does id(), an audited event.
        self._known: dict[str, dict[str, _Code]] = {}
        self.sites: dict[tuple[str, str, int], Site] = {}  # by file, qualified name and line

    def of(self, code: CodeType) -> _Code:
        in_file = self._known.get(code.co_filename)
        found = None if in_file is None else in_file.get(code.co_qualname)
        return found or self._classify(code)

    def _classify(self, code: CodeType) -> _Code:
        ends: Literal["engine", "outside", "user", "compiled"] | None = None
        if not is_internal(code.co_filename):
            ends = "user"
        with contextlib.suppress(TypeError):  # code of the program into which Dynamo put a dict has no hash
            if code in self.compiled:
                ends = "compiled"
            elif code in self.engine:
                ends = "engine"
            elif code in self.outside:
                ends = "outside"
        ends_loss = ends in ("engine", "outside") or code is self.module_call
        found = _Code(ends, ends_loss, is_loss_name(code.co_name))
        self._known.setdefault(code.co_filename, {})[code.co_qualname] = found
        return found


def find_site(boundary: StackBoundary, frame: FrameType | None = None) -> tuple[Site | None, bool]:
    """The innermost user line, from this frame upwards, and whether the walk ended at the autograd engine
    without finding one."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        ends = boundary.of(code).ends
        if ends is not None:
            if ends == "compiled":
                return boundary.compiled[code](frame.f_lineno), False
            if ends == "user":
                return _site(boundary, frame), False
            return None, ends == "engine"
        frame = frame.f_back
    return None, False


def in_loss_function(boundary: StackBoundary, frame: FrameType | None) -> bool:
    """Whether a function with a loss's name is running, inside the innermost module if there is one."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        found = boundary.of(frame.f_code)
        if found.ends_loss or found.is_loss:
            return not found.ends_loss
        frame = frame.f_back
    return False


def is_loss_name(name: str) -> bool:
    name = name.lower()
    return "loss" in name or "criterion" in name or "cross_entropy" in name


def _site(boundary: StackBoundary, frame: FrameType) -> Site:
    code = frame.f_code
    key = code.co_filename, code.co_qualname, frame.f_lineno
    site = boundary.sites.get(key)
    if site is None:
        caller = _caller(boundary, frame) if _is_installed(code.co_filename) else None
        function = code.co_qualname.replace("<locals>.", "")
        site = boundary.sites[key] = Site(code.co_filename, frame.f_lineno, function, caller=caller)
    return site


def _caller(boundary: StackBoundary, frame: FrameType | None) -> Site | None:
    """The nearest line above that is not an installed library's."""
    while frame is not None:
        ends = boundary.of(frame.f_code).ends
        if ends == "user" and not _is_installed(frame.f_code.co_filename):
            return _site(boundary, frame)
        if ends in ("outside", "engine"):
            return None
        frame = frame.f_back
    return None


def _is_installed(filename: str) -> bool:
    return f"site-packages{os.sep}" in filename or f"dist-packages{os.sep}" in filename


class ModuleStack:
    """The modules that are running. Every module is named by its path from the first root that was called.

    `mark` is called when a repeated block (one of several siblings of a class in a container) begins and
    ends.
    """

    def __init__(self, mark: Callable[[str], None]) -> None:
        self._mark = mark
        self._stack: list[str] = []  # their paths
        self._losses = 0  # among them
        self._names: dict[int, str] = {}
        # By id, with those like it in the container. Nothing here keeps a module of the program alive.
        self._blocks: dict[int, list[weakref.ref[nn.Module]]] = {}
        self._alive: dict[int, weakref.ref[nn.Module]] = {}  # the modules that have names
        self._inside_block = False
        self._calls_by_root: Counter[int] = Counter()  # of the modules that it calls itself, by id
        self.completed = 0  # calls of modules that were inside no other
        self._called: dict[bool, set[int]] = {True: set(), False: set()}  # their ids, by module.training
        self._last_called, self._last_training = 0, True
        self._last_root: weakref.ref[nn.Module] | None = None
        self._roots: list[weakref.ref[nn.Module]] = []
        self._has_root = False  # or had one
        # Sizes that the configs of the models state, by the letters that papers use: V, d, H, dk, f.
        self.dimensions: dict[str, int] = {}

    @property
    def path(self) -> str:
        return self._stack[-1] if self._stack else ""

    @property
    def inside_model(self) -> bool:
        """Whether a module other than a loss is running."""
        return len(self._stack) > self._losses

    @property
    def inside_loss(self) -> bool:
        return self._losses > 0

    @property
    def evaluating(self) -> bool:
        """Whether the model that ran last was in evaluation mode, and in training mode before."""
        return self._last_called in self._called[True] & self._called[False] and not self._last_training

    @property
    def in_evaluation_mode(self) -> nn.Module | None:
        """The model that ran last, if it was in evaluation mode."""
        return None if self._last_training or self._last_root is None else self._last_root()

    @property
    def evaluated(self) -> bool:
        """Whether a model ran in training mode and in evaluation mode."""
        return bool(self._called[True] & self._called[False])

    def name(self, root: nn.Module) -> None:
        """Give every module under `root` its path; those of later roots start with the root's class."""
        if id(root) in self._names:
            return
        prefix = type(root).__name__ if self._has_root else ""
        self._has_root = True
        self._roots.append(weakref.ref(root))
        for path, module in root.named_modules():
            path = ".".join(part for part in path.split(".") if part not in _WRAPPED)
            if id(module) not in self._names:
                self._names[id(module)] = ".".join(part for part in (prefix, path) if part)
                self._alive[id(module)] = weakref.ref(module, partial(self._forget, id(module)))
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                for block, run in _repeated_blocks(module).items():
                    self._blocks[block] = list(map(weakref.ref, run))
        self._add_dimensions(root)

    def _add_dimensions(self, root: nn.Module) -> None:
        for module in (root, *root.children()):
            config = getattr(module, "config", None)
            for letter, names in _CONFIG_NAMES.items():
                for size in (getattr(config, name, None) for name in names):
                    if isinstance(size, int) and not isinstance(size, bool) and size > 1:
                        self.dimensions.setdefault(letter, size)

    def _forget(self, id: int, module: object) -> None:
        """A module is gone. Another one may get its id."""
        for known in (self._names, self._blocks, self._alive):
            known.pop(id, None)
        for called in self._called.values():
            called.discard(id)

    def _living_roots(self) -> list[nn.Module]:
        self._roots = [ref for ref in self._roots if ref() is not None]
        return _living(self._roots)

    def tensor_names(self) -> list[tuple[torch.Tensor, tuple[str, Kind]]]:
        """Every parameter and buffer of the modules known so far, with its owner's path."""
        found: list[tuple[torch.Tensor, tuple[str, Kind]]] = []
        for root in self._living_roots():
            for module in root.modules():
                path = self._names.get(id(module), "")
                # Not by module.parameters(), which programs override.
                parameters = (each for each in module._parameters.values() if each is not None)
                buffers = (each for each in module._buffers.values() if each is not None)
                found += [(tensor, (path, "parameter")) for tensor in parameters]
                found += [(tensor, (path, "buffer")) for tensor in buffers]
        return found

    def follow(
        self,
        patches: Patches,
        boundary: StackBoundary,
        guard: RuleGuard,
        threads: set[int],
        call_root: Callable[..., Any],
        call_block: Callable[..., Any],
        before_root: Callable[[], None],
    ) -> None:
        """Push and pop around every module call of these threads for as long as `patches` last.

        `call_root` makes the calls of modules that are inside no other, `before_root` runs before them;
        `call_block` makes those of repeated blocks that are inside no other block.
        """
        call, stack = nn.Module.__call__, self

        # torch's profiler looks for the module by this name.
        def followed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() not in threads:
                return call(self, *args, **kwargs)
            key = id(self)
            path = stack._names.get(key)
            if path is None:
                guard.call("module path", type(self).__name__, lambda: stack.name(self), lambda: None)
                path = stack._names.get(key, "")
            run = stack._blocks.get(key)
            siblings = None if run is None else _living(run)
            outermost = siblings is not None and not stack._inside_block
            if siblings is not None:
                stack._mark(f"enter {path}")
            stack._stack.append(path)
            is_loss = _is_loss(self)
            stack._losses += is_loss
            try:
                if len(stack._stack) == 1:
                    stack._last_called, stack._last_training = key, bool(self.training)
                    stack._last_root = weakref.ref(self)
                    stack._called[stack._last_training].add(key)
                    stack._calls_by_root.clear()
                    before_root()
                    return call_root(call, self, args, kwargs)
                if outermost:
                    stack._inside_block = True
                    return call_block(call, self, siblings, path, args, kwargs)
                if len(stack._stack) == 2 and not torch.is_grad_enabled():
                    stack._calls_by_root[key] += 1
                    if stack._calls_by_root[key] > _FEW_CALLS:
                        return call_root(call, self, args, kwargs)
                return call(self, *args, **kwargs)
            finally:
                stack._stack.pop()
                stack._losses -= is_loss
                stack._inside_block &= not outermost
                stack.completed += not stack._stack
                if siblings is not None:
                    stack._mark(f"exit {path}")

        boundary.module_call = followed.__code__
        patches.set(nn.Module, "__call__", followed)


def _living(modules: Iterable[weakref.ref[nn.Module]]) -> list[nn.Module]:
    return [module for ref in modules if (module := ref()) is not None]


def _repeated_blocks(container: nn.ModuleList | nn.Sequential) -> dict[int, list[nn.Module]]:
    """Of each block, the run of those of its class that come one after the other with the same wrappers: the
    first blocks may be checkpointed and the others not."""
    # A container may hold None.
    children = [child for child in container if child is not None and any(True for _ in child.parameters())]
    kinds: dict[type, list[nn.Module]] = {}
    for child in children:
        kinds.setdefault(type(child), []).append(child)
    return {
        id(child): run
        for alike in kinds.values()
        if len(alike) > 1
        for run in (list(each) for _, each in itertools.groupby(alike, _wrappers_of_forward))
        for child in run
    }


def _wrappers_of_forward(module: nn.Module) -> list[type]:
    found, forward = [], vars(module).get("forward")
    while forward is not None:
        found.append(type(forward))
        forward = getattr(forward, "inner", None)
    return found


def _is_loss(module: nn.Module) -> bool:
    return isinstance(module, Loss) or type(module).__name__.lower().endswith("loss")


# ----------------------------------------------------------------------------------- what keeps tensors alive

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

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._searched_at = 0
        self._next_call = 0
        self._found: dict[Site, _Held] = {}

    def before_call(self) -> None:
        """Of a model: loops call one thousands of times, so fewer and fewer calls are looked at."""
        calls = self._tracer.modules.completed
        if calls >= self._next_call:
            self._next_call = calls + calls // 4 + 1
            self._tracer.label_parameters()  # inference has no backward pass, and may free its model
            self()

    def __call__(self) -> None:
        self._tracer.guard.call("lines that keep tensors", "a program", self._search, lambda: None)

    def found(self) -> tuple[Holder, ...]:
        """Those that hold most come first."""
        sizes = self._tracer.recorder.allocations
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
            allocation = self._tracer.recorder.allocation_of(tensor)
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
        step, call = self._tracer.step, self._tracer.modules.completed
        return {
            one.id: one.bytes
            for one in self._tracer.recorder.live_allocations()
            if (one.kind in ("activation", "temporary", "gradient") and 0 < one.step < step)
            or (one.kind in ("activation", "temporary") and one.call < call - 1)
            or (one.kind in ("batch", "parameter") and 1 < one.step < step)
        }

    def _program_frames(self) -> Iterator[FrameType]:
        boundary = self._tracer.boundary
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
