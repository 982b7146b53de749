"""Share equal buffers: causal masks, rotary tables and position ids that every layer registers for itself.

Buffers are compared bit by bit where they have data. In a prediction large buffers have none; they are
assumed equal if their owners have the same class and attributes, which can make a prediction wrong but never
a model. A forward that writes a shared buffer, and a state dict in which shared buffers differ, raise errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from oomph.errors import UserError
from oomph.fixes.journal import Journal
from oomph.fixes.modules import equal_groups, has_data, names_option
from oomph.fixes.registry import Fix, FixContext, Target
from oomph.units import MiB, format_bytes

_SMALLEST_SHARED = 512  # bytes: the allocator's smallest block
_SMALLEST_PROPOSED = 1 * MiB
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _Buffer(NamedTuple):
    path: str
    module: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor = self.module._buffers[self.name]
        assert tensor is not None
        return tensor

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


class SharedBuffers(Fix):
    name = "shared_buffers"
    kind = "exact"
    changes = "Buffers with the same values in several layers (masks, rotary tables) become one tensor."

    def targets(self, context: FixContext) -> Iterable[Target]:
        groups = _equal_buffers(context.model, None)
        saved = sum(_nbytes(group[0].tensor) * (len(group) - 1) for group in groups)
        if saved < _SMALLEST_PROPOSED:
            return
        note = f"{format_bytes(saved)} of buffers are copies"
        assumed = {group[0].name for group in groups if not has_data(group[0].tensor)}
        if assumed:
            note += f"; {', '.join(sorted(assumed))}: assumed equal here, compared when applied"
        yield Target(tuple(buffer.full_name for group in groups for buffer in group), note=note)

    def change_model(
        self, model: nn.Module, journal: Journal, *, buffers: Sequence[str] | None = None
    ) -> None:
        """`buffers`: their names in the modules that own them, e.g. ["mask"]; by default all equal ones."""
        names = None if buffers is None else names_option(self.name, "buffers", buffers)
        groups = _equal_buffers(model, names)
        if not groups:
            raise UserError(
                f"fix {self.name!r}: no two layers have an equal buffer (of 512 bytes or more) to share"
                + ("" if names is None else f" among {', '.join(names)}")
            )
        for first, *others in groups:
            for buffer in others:
                buffer.module._buffers[buffer.name] = first.tensor
                what = f"is the same tensor as {first.full_name}"
                # The journal keeps no copy: what is replaced on a GPU must be freed there.
                journal.record(buffer.full_name, what, partial(_unshare, buffer))
        full_names = tuple(tuple(buffer.full_name for buffer in group) for group in groups)
        handle = model.register_load_state_dict_pre_hook(partial(_check_state_dict, groups=full_names))
        what = "checks that a loaded state dict has equal values for shared buffers"
        journal.record("", what, handle.remove)
        # Moving a model makes a new tensor of every buffer; shared ones must stay one tensor.
        journal.set(model, "_apply", partial(_apply_once_to_shared, model), "", "moves shared buffers once")
        firsts = tuple((group[0].full_name, group[0].module, group[0].name) for group in groups)
        journal.wrap_forward(
            model, partial(_checking_versions, shared=firsts), "", "checks that no shared buffer is written"
        )


def _unshare(buffer: _Buffer) -> None:
    shared = buffer.module._buffers.get(buffer.name)
    if shared is not None:
        buffer.module._buffers[buffer.name] = shared.clone()


def _check_state_dict(
    model: nn.Module, state: dict[str, Any], prefix: str, *_: Any, groups: tuple[tuple[str, ...], ...]
) -> None:
    """Loading writes each buffer; of shared ones, the last would win."""
    for first, *others in groups:
        for other in others:
            one, two = state.get(prefix + first), state.get(prefix + other)
            if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
                continue
            if not _same_tensor(one, two.to(one.device) if has_data(one) and has_data(two) else two):
                raise UserError(
                    f"fix 'shared_buffers': the loaded state has other values in {other!r} than in "
                    f"{first!r}, which are one tensor in this model; undo the fix first"
                )


def _apply_once_to_shared(model: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
    """nn.Module._apply, which .to(), .cuda() and .half() call, with one call of `fn` per shared buffer."""
    count = Counter(id(one) for module in model.modules() for one in module._buffers.values())
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holding the original keeps its id unique

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if count[id(tensor)] < 2:
            return fn(tensor)
        if id(tensor) not in moved:
            moved[id(tensor)] = (tensor, fn(tensor))
        return moved[id(tensor)][1]

    return type(model)._apply(model, once, recurse)


def _checking_versions(
    forward: Callable[..., Any], *args: Any, shared: tuple[tuple[str, nn.Module, str], ...], **kwargs: Any
) -> Any:
    before = [
        (name, tensor, tensor._version)
        for name, module, buffer in shared
        if (tensor := module._buffers.get(buffer)) is not None and not tensor.is_inference()
    ]
    result = forward(*args, **kwargs)
    for name, tensor, version in before:
        if tensor._version != version:
            raise UserError(
                f"fix 'shared_buffers': forward writes buffer {name!r}, which is shared with other layers; "
                "undo the fix, or name the buffers that may be shared in buffers=[...]"
            )
    return result


# ---------------------------------------------------------------------------------------- equal buffers


def _equal_buffers(model: nn.Module, names: list[str] | None) -> list[list[_Buffer]]:
    """Groups of two or more buffers that are different tensors with equal values."""
    found: dict[int, _Buffer] = {}
    for path, module in model.named_modules():
        for name, tensor in module._buffers.items():
            chosen = tensor is not None and (names is None or name in names)
            if chosen and _may_be_shared(module, name, tensor):
                found.setdefault(id(tensor), _Buffer(path, module, name))
    return equal_groups(found.values(), _equal)


def _may_be_shared(module: nn.Module, name: str, tensor: torch.Tensor) -> bool:
    """Not running statistics, nothing that is learned, nothing tiny."""
    return (
        not type(module).__module__.startswith("torch.")
        and not name.startswith("running_")
        and type(tensor) is not nn.Parameter
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and _nbytes(tensor) >= _SMALLEST_SHARED
    )


def _equal(one: _Buffer, other: _Buffer) -> bool:
    mine, theirs = one.tensor, other.tensor
    if (type(one.module), one.name, mine.stride()) != (type(other.module), other.name, theirs.stride()):
        return False
    same = has_data(mine) and has_data(theirs)
    if not _same_tensor(mine, theirs):
        return False
    return same or _same_attributes(one.module, other.module, {"layer_idx", "layer_id"})


def same_attributes_and_buffers(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules without parameters and children compute the same function."""
    if type(one) is not type(other) or not _same_attributes(one, other):
        return False
    return one._buffers.keys() == other._buffers.keys() and all(
        _same_value(mine, theirs)
        for mine, theirs in zip(one._buffers.values(), other._buffers.values(), strict=True)
    )


def _same_attributes(one: nn.Module, other: nn.Module, ignored: Collection[str] = ()) -> bool:
    mine, theirs = (
        {
            name: value
            for name, value in vars(module).items()
            if name not in _OF_EVERY_MODULE and name not in ignored
        }
        for module in (one, other)
    )
    return mine.keys() == theirs.keys() and all(_same_value(mine[name], theirs[name]) for name in mine)


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensor(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bits where both have data, so that -0.0 differs from 0.0 and NaN equals itself."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    bits = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return not (has_data(one) and has_data(other)) or torch.equal(*bits)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
