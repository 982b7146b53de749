"""Where an allocation comes from: its source line and module."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from oomph.prediction.compat.pass_through import PASS_CALLS_ON
from oomph.prediction.ops.rules import RuleGuard
from oomph.prediction.patches import Patches
from oomph.records import Kind, Site
from oomph.torch_internals import Loss

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
        return bool(package) and package[0] in PASS_CALLS_ON
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
        self.sites: dict[
            tuple[str, str, int, Site | None], Site
        ] = {}  # by file, qualified name, line, caller
        # For each call of a module that runs, the line of the user's own that it came from, once known.
        self.callers: list[Site | Literal["unknown"] | None] = []

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
    caller = None
    if _is_installed(code.co_filename):
        caller = _caller(boundary, frame.f_back, len(boundary.callers))
    key = code.co_filename, code.co_qualname, frame.f_lineno, caller
    site = boundary.sites.get(key)
    if site is None:
        function = code.co_qualname.replace("<locals>.", "")
        site = boundary.sites[key] = Site(code.co_filename, frame.f_lineno, function, caller=caller)
    return site


def _caller(boundary: StackBoundary, frame: FrameType | None, modules: int) -> Site | None:
    """The nearest line above that is not an installed library's. `modules`: calls of them that are above."""
    while frame is not None:
        code = frame.f_code
        if code is boundary.module_call and modules:
            known = boundary.callers[modules - 1]
            if known == "unknown":
                known = boundary.callers[modules - 1] = _caller(boundary, frame.f_back, modules - 1)
            return known
        ends = boundary.of(code).ends
        if ends == "user" and not _is_installed(code.co_filename):
            return _site(boundary, frame)
        if ends == "outside":
            return None
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
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
        self._blocks: dict[int, _Run] = {}
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
                for run in _repeated_blocks(module):
                    self._blocks.update(dict.fromkeys(map(id, run), _Run(run)))
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
        return [root for ref in self._roots if (root := ref()) is not None]

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
        before_root: Callable[[nn.Module], None],
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
            siblings = stack._blocks.get(key)
            outermost = siblings is not None and not stack._inside_block
            if siblings is not None:
                stack._mark(f"enter {path}")
            stack._stack.append(path)
            boundary.callers.append("unknown")
            is_loss = _is_loss(self)
            stack._losses += is_loss
            try:
                if len(stack._stack) == 1:
                    stack._last_called, stack._last_training = key, bool(self.training)
                    stack._last_root = weakref.ref(self)
                    stack._called[stack._last_training].add(key)
                    stack._calls_by_root.clear()
                    before_root(self)
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
                boundary.callers.pop()
                stack._losses -= is_loss
                stack._inside_block &= not outermost
                stack.completed += not stack._stack
                if siblings is not None:
                    stack._mark(f"exit {path}")

        boundary.module_call = followed.__code__
        patches.set(nn.Module, "__call__", followed)


class _Run(Sequence[nn.Module]):
    """The blocks of one that are alive. There may be thousands, and each is called."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._complete = True
        self._refs = [weakref.ref(module, self._lose) for module in modules]

    def _lose(self, _: object) -> None:
        self._complete = False

    def _living(self) -> list[weakref.ref[nn.Module]]:
        if not self._complete:
            self._refs = [ref for ref in self._refs if ref() is not None]
            self._complete = True
        return self._refs

    def __len__(self) -> int:
        return len(self._living())

    def __getitem__(self, index: Any) -> Any:
        return self._living()[index]()


def _repeated_blocks(container: nn.ModuleList | nn.Sequential) -> list[list[nn.Module]]:
    """Runs of blocks of one class that come one after the other with the same wrappers: the first blocks may
    be checkpointed and the others not."""
    # A container may hold None.
    children = [child for child in container if child is not None and any(True for _ in child.parameters())]
    kinds: dict[type, list[nn.Module]] = {}
    for child in children:
        kinds.setdefault(type(child), []).append(child)
    return [
        list(run)
        for alike in kinds.values()
        if len(alike) > 1
        for _, run in itertools.groupby(alike, _wrappers_of_forward)
    ]


def _wrappers_of_forward(module: nn.Module) -> list[type]:
    found, forward = [], vars(module).get("forward")
    while forward is not None:
        found.append(type(forward))
        forward = getattr(forward, "inner", None)
    return found


def _is_loss(module: nn.Module) -> bool:
    return isinstance(module, Loss) or type(module).__name__.lower().endswith("loss")
