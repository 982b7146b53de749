"""One tensor for equal buffers: causal masks, RoPE tables and position ids that every layer keeps for itself.

Buffers are compared bit by bit, where their data is there. In a prediction large ones have no data; they are
taken to be equal if their owners are of one class with the same settings, which can make a prediction wrong
but never a model. A shared buffer that a forward writes after all, and a checkpoint in which buffers that
are shared differ, are errors, not wrong results.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.modules import has_data, names_option
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.units import MiB, format_bytes

_SMALLEST = 512  # bytes: what the smallest block takes
_WORTH_PROPOSING = 1 * MiB
_NOT_A_SETTING = {*vars(nn.Module()), "layer_idx", "layer_id"}


class _Owner(NamedTuple):
    path: str
    module: nn.Module
    buffer: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.module._buffers[self.buffer]
        assert tensor is not None
        return tensor

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.buffer}" if self.path else self.buffer


class SharedBuffers(Fix):
    name = "shared_buffers"
    kind = "exact"
    changes = "Buffers with the same values in several layers (masks, RoPE tables) become one tensor."

    def targets(self, context: FixContext) -> Iterable[Target]:
        groups = _groups(context.model, None)
        saved = sum(_bytes_of(group[0].tensor) * (len(group) - 1) for group in groups)
        if saved < _WORTH_PROPOSING:
            return
        unseen = [group[0].buffer for group in groups if not has_data(group[0].tensor)]
        note = f"{format_bytes(saved)} of buffers are copies"
        if unseen:
            note += f"; {', '.join(sorted(set(unseen)))}: assumed equal here, compared when applied"
        yield Target(tuple(owner.full_name for group in groups for owner in group), note=note)

    def change_model(
        self, model: nn.Module, journal: Journal, *, buffers: Sequence[str] | None = None
    ) -> None:
        """`buffers`: their names in the modules that own them, e.g. ["mask"]; by default all equal ones."""
        names = None if buffers is None else names_option(self.name, "buffers", buffers)
        groups = _groups(model, names)
        if not groups:
            raise UserError(
                "fix 'shared_buffers': no two layers have an equal buffer (of 512 bytes or more) to share"
                + ("" if names is None else f" among {', '.join(names)}")
            )
        shared = []
        for first, *others in groups:
            for owner in others:
                _share(owner, first.tensor, journal, first.full_name)
            shared.append((first.full_name, first.module, first.buffer))
        names_of = tuple(tuple(owner.full_name for owner in group) for group in groups)
        handle = model.register_load_state_dict_pre_hook(partial(_differ, groups=names_of))
        journal.add_hook(handle, "", "sees that loaded state does not tell shared buffers apart")
        # Moving a model makes a new tensor of every buffer; of a shared one it must be one.
        journal.set(model, "_apply", partial(_move_shared_once, model), "", "moves shared buffers once")
        journal.wrap_forward(
            model, partial(_unwritten, shared=tuple(shared)), "", "sees that no shared buffer is written"
        )


def _differ(
    model: nn.Module, state: dict[str, Any], prefix: str, *_: Any, groups: tuple[tuple[str, ...], ...]
) -> None:
    """Before state is loaded: of buffers that are one tensor, the last one's values would be everybody's."""
    for first, *others in groups:
        for other in others:
            one, two = state.get(prefix + first), state.get(prefix + other)
            if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) and not _same_values(one, two):
                raise UserError(
                    f"fix 'shared_buffers': the state that is loaded has other values in {other!r} than in "
                    f"{first!r}, which are one tensor here; undo the fix first"
                )


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _same_tensor(one, other.to(one.device) if has_data(one) and has_data(other) else other)


def _groups(model: nn.Module, names: list[str] | None) -> list[list[_Owner]]:
    """Owners of different tensors that are equal, two or more each."""
    alike: dict[Any, list[list[_Owner]]] = {}
    seen: set[int] = set()
    written: dict[type, frozenset[str]] = {}
    for path, module in model.named_modules():
        for buffer, tensor in module._buffers.items():
            if tensor is None or id(tensor) in seen or not (names is None or buffer in names):
                continue
            if not _may_be_shared(module, buffer, tensor):
                continue
            if type(module) not in written:
                written[type(module)] = _written(type(module))
            if buffer in written[type(module)]:
                continue
            seen.add(id(tensor))
            owner = _Owner(path, module, buffer)
            for group in (groups := alike.setdefault(_kind_of(owner), [])):
                if _equal(group[0], owner):
                    group.append(owner)
                    break
            else:
                groups.append([owner])
    return [group for groups in alike.values() for group in groups if len(group) > 1]


def _may_be_shared(module: nn.Module, buffer: str, tensor: torch.Tensor) -> bool:
    """Not the running statistics of torch's own layers; not what is learned; not what is tiny."""
    return (
        not type(module).__module__.startswith("torch.")
        and not buffer.startswith("running_")
        and type(tensor) is not nn.Parameter
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and _bytes_of(tensor) >= _SMALLEST
    )


def _written(kind: type[nn.Module]) -> frozenset[str]:
    """Attributes that the class's own code writes in place: self.x[...] = , self.x += , self.x.copy_()."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            break
        try:
            code = [value for name, value in vars(base).items() if not name.startswith("__")]
            source = "".join(inspect.getsource(one) for one in code if inspect.isfunction(one))
        except OSError:
            continue
        names.update(re.findall(r"self\.(\w+)\s*\[[^=\n]*\]\s*[-+*/|&]?=(?!=)", source))
        names.update(re.findall(r"self\.(\w+)\s*[-+*/|&]=", source))
        names.update(re.findall(r"self\.(\w+)(?:\[[^\n]*\])?\.(?:data\.)?\w*[a-z0-9]_\(", source))
        names.update(re.findall(r"out\s*=\s*self\.(\w+)", source))
    return frozenset(names)


def _kind_of(owner: _Owner) -> Any:
    tensor = owner.tensor
    return (type(owner.module), owner.buffer, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _equal(one: _Owner, other: _Owner) -> bool:
    if has_data(one.tensor) and has_data(other.tensor):
        return torch.equal(_bits(one.tensor), _bits(other.tensor))
    return _same_settings(one.module, other.module)


def same_settings_and_buffers(one: nn.Module, other: nn.Module) -> bool:
    """Do two modules without parameters and parts compute the same?"""
    if type(one) is not type(other) or not _same_settings(one, other):
        return False
    if one._buffers.keys() != other._buffers.keys():
        return False
    return all(
        (mine is None) == (theirs is None) and (mine is None or theirs is None or _same_tensor(mine, theirs))
        for mine, theirs in zip(one._buffers.values(), other._buffers.values(), strict=True)
    )


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return not (has_data(one) and has_data(other)) or torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """So that -0.0 is not 0.0, and NaN is itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _settings(module: nn.Module) -> dict[str, Any]:
    """What tells modules of one class apart, other than which layer they are."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_A_SETTING}


def _same_settings(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = _settings(one), _settings(other)
    return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensor(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _share(owner: _Owner, shared: torch.Tensor, journal: Journal, first: str) -> None:
    buffers, name, own = owner.module._buffers, owner.buffer, owner.tensor
    buffers[name] = shared

    def undo() -> None:
        now = buffers.get(name)
        if now is shared or now is None:
            buffers[name] = own
        else:  # the model was moved since: a tensor of its own, where the model is now
            buffers[name] = own.to(now.device, now.dtype) if has_data(own) else now.clone()

    journal.record(owner.full_name, f"is the same tensor as {first}", undo)


def _move_shared_once(model: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """nn.Module._apply, which .to(), .cuda(), .half() and their kin go through."""
    count = Counter(id(one) for module in model.modules() for one in module._buffers.values())
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the first keeps the id from being used again

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if count[id(tensor)] < 2:
            return fn(tensor)
        if id(tensor) not in moved:
            moved[id(tensor)] = (tensor, fn(tensor))
        return moved[id(tensor)][1]

    return type(model)._apply(model, once, recurse)


def _unwritten(
    forward: Callable[..., Any], *args: Any, shared: tuple[tuple[str, nn.Module, str], ...], **kwargs: Any
) -> Any:
    versions = [_version(module._buffers.get(buffer)) for _, module, buffer in shared]
    result = forward(*args, **kwargs)
    for (name, module, buffer), version in zip(shared, versions, strict=True):
        now = _version(module._buffers.get(buffer))
        if now is not None and version is not None and now[0] is version[0] and now[1] != version[1]:
            raise UserError(
                f"fix 'shared_buffers': forward writes buffer {name!r}, which is shared with other layers; "
                "undo the fix, or name the buffers that may be shared in buffers=[...]"
            )
    return result


def _version(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    return None if tensor is None or tensor.is_inference() else (tensor, tensor._version)
