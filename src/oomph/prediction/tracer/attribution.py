"""Where an allocation comes from: the user's source line, and the path of the module that is running."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from oomph.prediction.cuda.rules import RuleGuard
from oomph.prediction.tracer.fake_cuda import Patches
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
_PASS_THROUGH_LIBRARIES = ("einops", "typing_extensions", "jaxtyping", "beartype", "opt_einsum", "triton")


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


class _Code(NamedTuple):
    """What a frame with this code means to the walk up the stack."""

    ends: Literal["engine", "outside", "user", "compiled"] | None
    ends_loss: bool  # a loss's function that is further up is not the innermost module's
    is_loss: bool
    code: CodeType  # kept alive, so that its id stays its own


class StackBoundary:
    """Code objects at which the walk up the stack ends: beyond them is not the user's program."""

    def __init__(self) -> None:
        self.engine: set[CodeType] = set()  # autograd's engine was called from here
        self.outside: set[CodeType] = set()  # the trace was started from here
        self.module_call: CodeType | None = None  # a module was called from here
        # of a program that the compiler generated, with the site of each line
        self.compiled: dict[CodeType, Callable[[int], CompiledSite | None]] = {}
        self.known: dict[int, _Code] = {}  # by id: to hash a code object takes long

    def classify(self, code: CodeType) -> _Code:
        ends: Literal["engine", "outside", "user", "compiled"] | None = None
        if code in self.compiled:
            ends = "compiled"
        elif code in self.engine:
            ends = "engine"
        elif code in self.outside:
            ends = "outside"
        elif not is_internal(code.co_filename):
            ends = "user"
        ends_loss = ends in ("engine", "outside") or code is self.module_call
        found = self.known[id(code)] = _Code(ends, ends_loss, is_loss_name(code.co_name), code)
        return found


def find_site(boundary: StackBoundary, depth: int = 1) -> tuple[Site | None, bool]:
    """The innermost user line, and whether the walk ended at the autograd engine without finding one."""
    frame: FrameType | None = sys._getframe(depth)
    known = boundary.known
    while frame is not None:
        code = frame.f_code
        ends = (known.get(id(code)) or boundary.classify(code)).ends
        if ends is not None:
            if ends == "compiled":
                return boundary.compiled[code](frame.f_lineno), False
            if ends == "user":
                return _site(code.co_filename, frame.f_lineno, code.co_qualname), False
            return None, ends == "engine"
        frame = frame.f_back
    return None, False


def in_loss_function(boundary: StackBoundary, depth: int = 1) -> bool:
    """Whether a function with a loss's name is running, inside the innermost module if there is one."""
    frame: FrameType | None = sys._getframe(depth)
    known = boundary.known
    while frame is not None:
        code = frame.f_code
        found = known.get(id(code)) or boundary.classify(code)
        if found.ends_loss or found.is_loss:
            return not found.ends_loss
        frame = frame.f_back
    return False


def is_loss_name(name: str) -> bool:
    name = name.lower()
    return "loss" in name or "criterion" in name or "cross_entropy" in name


@lru_cache(maxsize=65536)
def _site(file: str, line: int, function: str) -> Site:
    return Site(file, line, function.replace("<locals>.", ""))


class ModuleStack:
    """The modules that are running. Every module is named by its path from the first root that was called.

    `mark` is called when a repeated block (one of several siblings of a class in a container) begins and
    ends.
    """

    def __init__(self, mark: Callable[[str], None]) -> None:
        self._mark = mark
        self._stack: list[tuple[str, bool]] = []  # path, and whether it is a loss
        self._names: dict[int, str] = {}
        self._blocks: dict[int, list[nn.Module]] = {}  # by id, with those of its class in the container
        self._inside_block = False
        self.completed = 0  # calls of modules that were inside no other
        self._roots: list[nn.Module] = []  # kept alive, so that the ids above stay theirs

    @property
    def path(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    @property
    def inside_model(self) -> bool:
        """Whether a module other than a loss is running."""
        return any(not is_loss for _, is_loss in self._stack)

    @property
    def inside_loss(self) -> bool:
        return any(is_loss for _, is_loss in self._stack)

    def name(self, root: nn.Module) -> None:
        """Give every module under `root` its path; those of later roots start with the root's class."""
        if id(root) in self._names:
            return
        prefix = "" if not self._roots else type(root).__name__
        self._roots.append(root)
        for path, module in root.named_modules():
            path = path.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")
            self._names.setdefault(id(module), ".".join(part for part in (prefix, path) if part))
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                self._blocks |= _repeated_blocks(module)

    def dimensions(self) -> tuple[tuple[str, int], ...]:
        """Sizes that the configs of the models state, by the letters that papers use: V, d, H, dk, f."""
        found: dict[str, int] = {}
        for root in self._roots:
            for module in (root, *root.children()):
                config = getattr(module, "config", None)
                for letter, names in _CONFIG_NAMES.items():
                    for size in (getattr(config, name, None) for name in names):
                        if isinstance(size, int) and not isinstance(size, bool) and size > 1:
                            found.setdefault(letter, size)
        return tuple(found.items())

    def tensor_names(self) -> list[tuple[torch.Tensor, tuple[str, Kind]]]:
        """Every parameter and buffer of the modules known so far, with its owner's path."""
        found: list[tuple[torch.Tensor, tuple[str, Kind]]] = []
        for root in self._roots:
            for module in root.modules():
                path = self._names.get(id(module), "")
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
        call = nn.Module.__call__

        def followed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() not in threads:
                return call(module, *args, **kwargs)
            if id(module) not in self._names:
                guard.call("module path", type(module).__name__, lambda: self.name(module), lambda: None)
            path = self._names.get(id(module), "")
            siblings = self._blocks.get(id(module))
            outermost = siblings is not None and not self._inside_block
            if siblings is not None:
                self._mark(f"enter {path}")
            self._stack.append((path, _is_loss(module)))
            try:
                if len(self._stack) == 1:
                    before_root()
                    return call_root(call, module, args, kwargs)
                if outermost:
                    self._inside_block = True
                    return call_block(call, module, siblings, path, args, kwargs)
                return call(module, *args, **kwargs)
            finally:
                self._stack.pop()
                self._inside_block &= not outermost
                self.completed += not self._stack
                if siblings is not None:
                    self._mark(f"exit {path}")

        boundary.module_call = followed.__code__
        patches.set(nn.Module, "__call__", followed)


def _repeated_blocks(container: nn.ModuleList | nn.Sequential) -> dict[int, list[nn.Module]]:
    # A container may hold None.
    children = [child for child in container if child is not None and any(True for _ in child.parameters())]
    kinds: dict[type, list[nn.Module]] = {}
    for child in children:
        kinds.setdefault(type(child), []).append(child)
    return {id(child): alike for alike in kinds.values() if len(alike) > 1 for child in alike}


def _is_loss(module: nn.Module) -> bool:
    return isinstance(module, Loss) or type(module).__name__.lower().endswith("loss")
