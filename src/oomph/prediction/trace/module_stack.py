"""Which module is running now, by its path from the root."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from oomph.prediction.trace.patching import Patches
from oomph.prediction.trace.sites import Boundary
from oomph.records import Kind


class ModuleStack:
    """Follows calls of nn.Module; names every module by its path from the first root that was called.

    `mark` is told when a repeated block (one of several siblings of a class in a container) begins and ends.
    """

    def __init__(self, mark: Callable[[str], None]) -> None:
        self._mark = mark
        self._stack: list[tuple[str, nn.Module]] = []
        self._names: dict[int, str] = {}
        self._blocks: set[int] = set()
        self.completed = 0  # calls of modules that were inside no other
        self._roots: list[nn.Module] = []  # kept alive, so that the ids above stay theirs

    @property
    def path(self) -> str:
        return self._stack[-1][0] if self._stack else ""

    @property
    def inside_model(self) -> bool:
        """Whether a module other than a loss is running."""
        return any(not _is_loss(module) for _, module in self._stack)

    @property
    def inside_loss(self) -> bool:
        return any(_is_loss(module) for _, module in self._stack)

    def name(self, root: nn.Module) -> None:
        """Give every module under `root` its path; those of later roots start with the root's class."""
        if id(root) in self._names:
            return
        prefix = "" if not self._roots else type(root).__name__
        self._roots.append(root)
        for path, module in root.named_modules():
            self._names.setdefault(id(module), ".".join(part for part in (prefix, path) if part))
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                self._blocks.update(_repeated_blocks(module))

    def tensor_names(self) -> list[tuple[torch.Tensor, tuple[str, Kind]]]:
        """Every parameter and buffer of the modules known so far, with its owner's path."""
        found: list[tuple[torch.Tensor, tuple[str, Kind]]] = []
        for root in self._roots:
            for module in root.modules():
                path = self._names.get(id(module), "")
                found += [
                    (tensor, (path, "parameter"))
                    for tensor in module._parameters.values()
                    if tensor is not None
                ]
                found += [
                    (tensor, (path, "buffer")) for tensor in module._buffers.values() if tensor is not None
                ]
        return found

    def follow(self, patches: Patches, boundary: Boundary) -> None:
        """Push and pop around every module call for as long as `patches` last."""
        call = nn.Module.__call__

        thread = threading.get_ident()

        def followed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return call(module, *args, **kwargs)
            self.name(module)
            path = self._names[id(module)]
            is_block = id(module) in self._blocks
            if is_block:
                self._mark(f"enter {path}")
            self._stack.append((path, module))
            try:
                return call(module, *args, **kwargs)
            finally:
                self._stack.pop()
                self.completed += not self._stack
                if is_block:
                    self._mark(f"exit {path}")

        boundary.module_call = followed.__code__
        patches.set(nn.Module, "__call__", followed)


def _repeated_blocks(container: nn.ModuleList | nn.Sequential) -> list[int]:
    children = [child for child in container if any(True for _ in child.parameters())]
    kinds = [type(child) for child in children]
    return [id(child) for child in children if kinds.count(type(child)) > 1]


def _is_loss(module: nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.loss._Loss) or type(module).__name__.lower().endswith("loss")
