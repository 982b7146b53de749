"""A model's repeated blocks: what checkpointing, offloading and sharding work on one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)


class NamedModule(NamedTuple):
    name: str
    module: nn.Module


def blocks(model: nn.Module) -> list[list[NamedModule]]:
    """The outermost lists of two or more similar modules with parameters: a transformer's layers.

    A ModuleList may mix classes, with several of each, as in models that alternate attention and state-space
    layers; unless its members hold such lists themselves. A ModuleList of ModuleLists, as in U-Nets, is one
    list, without layers that have no children. A block that appears several times is listed once.
    """
    found: list[list[NamedModule]] = []

    def search(name: str, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        # Unlike named_children, with repetitions: one block that is called several times is a list, too.
        children = [
            NamedModule(f"{name}.{own}".strip("."), child)
            for own, child in module._modules.items()
            if child is not None
        ]
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            members = [child for child in children if next(child.module.parameters(), None) is not None]
            if any(isinstance(child.module, _LISTS) for child in members):
                inside = (inner for child in members for inner in _inside(child))
                members = [inner for inner in inside if has_children(inner.module)]
            each_once = list({id(child.module): child for child in reversed(members)}.values())[::-1]
            if _are_blocks(members) and len({type(child.module) for child in members}) == 1:
                found.append(each_once)
                return
            if isinstance(module, nn.ModuleList) and _are_blocks(members):
                before = len(found)
                for child in children:
                    search(child.name, child.module, seen)
                if len(found) == before:
                    found.append(each_once)
                return
        for child in children:
            search(child.name, child.module, seen)

    search("", model, set())
    return found


def _inside(named: NamedModule) -> list[NamedModule]:
    """The modules of nested lists, which are not called themselves."""
    if not isinstance(named.module, _LISTS):
        return [named]
    children = (NamedModule(f"{named.name}.{own}", child) for own, child in named.module.named_children())
    return [inner for child in children for inner in _inside(child)]


def block_names(model: nn.Module) -> list[str]:
    return [name for group in blocks(model) for name, _ in group]


def _are_blocks(members: Sequence[NamedModule]) -> bool:
    kinds = Counter(type(member.module) for member in members)
    return bool(kinds) and min(kinds.values()) > 1 and all(has_children(member.module) for member in members)


def has_children(module: nn.Module) -> bool:
    """A list of bare Linear or Conv layers is not a list of blocks."""
    return next(module.children(), None) is not None
