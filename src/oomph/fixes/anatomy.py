"""What a model is made of, as fixes see it: its repeated blocks, and what must be left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from oomph.errors import UserError


class Named(NamedTuple):
    name: str
    module: nn.Module


def blocks(model: nn.Module) -> list[list[Named]]:
    """The outermost lists of modules with parameters that come in twos or more: a transformer's layers.

    A ModuleList may mix classes, several of each, as where attention and state-space layers take turns; not
    where its members hold such lists themselves. A block that appears several times is listed once.
    """
    found: list[list[Named]] = []

    def search(name: str, module: nn.Module, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        # All, unlike named_children: one block that is called again and again is a list of blocks, too.
        children = [
            Named(_join(name, own), child) for own, child in module._modules.items() if child is not None
        ]
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            members = [child for child in children if next(child.module.parameters(), None) is not None]
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


def _are_blocks(members: Sequence[Named]) -> bool:
    kinds = Counter(type(member.module) for member in members)
    return bool(kinds) and min(kinds.values()) > 1 and all(map(_is_block, members))


def _is_block(child: Named) -> bool:
    """A list of bare Linear or Conv layers is no list of blocks."""
    return next(child.module.children(), None) is not None


def names_option(fix: str, option: str, value: object) -> list[str]:
    """The names of modules that an option holds; one may be given by itself."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names) or not names:
        raise UserError(f"fix {fix!r}: {option}={value!r} is not valid; give a list of names of modules")
    return list(dict.fromkeys(names))


def module_at(model: nn.Module, name: str, fix: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UserError(f"fix {fix!r}: the model has no module {name!r}") from None


def repeated_inside(module: nn.Module) -> list[Named]:
    """The members of lists inside a module, which is what checkpoints are put around; not torch's layers."""
    found: dict[int, Named] = {}
    for name, owner in module.named_modules():
        if isinstance(owner, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for own, member in owner.named_children():
                if not isinstance(member, nn.ModuleList | nn.ModuleDict) and _is_block(Named(own, member)):
                    found.setdefault(id(member), Named(_join(name, own), member))
    return list(found.values())


def enclosing(model: nn.Module, names: Sequence[str]) -> Named:
    """The innermost module with a forward that has all these inside."""
    paths = [name.split(".") for name in names]
    common: list[str] = []
    for parts in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    while common and isinstance(model.get_submodule(".".join(common)), nn.ModuleList | nn.ModuleDict):
        common.pop()
    return Named(".".join(common), model.get_submodule(".".join(common)))


def name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def is_plain_linear(module: nn.Module) -> bool:
    """An nn.Linear and nothing else: not quantised, not parametrized, no adapter, not fixed already."""
    return (
        type(module) is nn.Linear
        and is_plain_parameter(module.weight)
        and not hasattr(module, "parametrizations")
        and "forward" not in vars(module)
    )


def is_plain_parameter(tensor: object) -> bool:
    """Of no tensor subclass, except a prediction's, which stands for a plain one."""
    return type(tensor) is nn.Parameter or (
        isinstance(tensor, FakeTensor) and isinstance(tensor, nn.Parameter)
    )


def has_data(tensor: torch.Tensor) -> bool:
    """Not in a prediction, where all but small data on the host is missing; not on the meta device."""
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"


def is_hugging_face(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def configs(model: nn.Module) -> list[tuple[str, Any]]:
    """The distinct `config` objects of its modules, named: an encoder and a decoder may have their own."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is not None:
            found.setdefault(id(config), (_join(name, "config"), config))
    return list(found.values())


def check_can_be_fixed(model: nn.Module) -> None:
    """One clear line for models whose modules are no longer in charge of what they compute."""
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("the model is scripted by torch.jit, so it cannot be changed; apply fixes before")
    if kind == "OptimizedModule" or any(m._compiled_call_impl is not None for m in model.modules()):
        raise UserError("the model is compiled; apply fixes first, then torch.compile what they leave")
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for module in model.modules():
        if isinstance(module, wrappers):
            kind = type(module).__name__
            raise UserError(f"the model is wrapped in {kind}; apply fixes to the model inside, then wrap it")
    if any(type(m).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine") for m in model.modules()):
        raise UserError("the model is sharded already; apply fixes to the model before it is sharded")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
