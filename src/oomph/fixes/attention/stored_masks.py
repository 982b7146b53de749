"""Causal masks that modules store as buffers, replaced by what answers like them and is not in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from oomph.fixes.attention.lazy_masks import StoredMask
from oomph.fixes.attention.mode import Known
from oomph.fixes.attention.score_state import version
from oomph.fixes.attention.triangles import Triangle, after, found_in
from oomph.fixes.journal import Journal, WrappedForward
from oomph.ops.launch import is_fake

_KNOWN = "_oomph_triangle"  # of a buffer without data: what it would hold


def drop_stored_masks(module: nn.Module, name: str, journal: Journal) -> None:
    """Every buffer of this module that is a triangle of two values, as masks of causal attention are."""
    for key, buffer in list(module._buffers.items()):
        if buffer is None or key in vars(module):
            continue
        triangle = _triangle(buffer)
        if triangle is None:
            continue
        anchor = buffer.new_empty(0)
        journal.set(module, key, anchor, name, f"stored mask {key} {list(buffer.shape)} dropped")
        mask = vars(module)[key] = StoredMask(triangle, module, key)
        journal.record(name, f"{key} is known to be a triangle", partial(vars(module).pop, key, None))
        if key not in module._non_persistent_buffers_set:
            for method, around in (("_save_to_state_dict", _save), ("_load_from_state_dict", _load)):
                inside = WrappedForward(getattr(module, method), partial(around, mask=mask))
                journal.set(module, method, inside, name, f"{key} stays in checkpoints")


def _triangle(buffer: Tensor) -> Triangle | None:
    if buffer.is_meta or buffer.layout is not torch.strided or type(buffer) is nn.Parameter:
        return None
    if not is_fake(buffer):
        return found_in(buffer)
    triangle, then = getattr(buffer, _KNOWN, (None, 0))
    return triangle if then == version(buffer) else None


def _save(
    save: Callable[..., None], state: dict[str, Any], prefix: str, *rest: Any, mask: StoredMask
) -> None:
    save(state, prefix, *rest)
    if mask.is_in_place:
        state[prefix + mask.name] = mask.real()


def _load(
    load: Callable[..., None], state: dict[str, Any], prefix: str, *rest: Any, mask: StoredMask
) -> None:
    key = prefix + mask.name
    if mask.is_in_place and key in state:
        state = {**state, key: mask.anchor}
    load(state, prefix, *rest)


@dataclass(frozen=True)
class Watched:
    """Builds a model; where that is done without data, remembers of masks what they would hold."""

    build: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        if _get_current_dispatch_mode() is None:
            return self.build()
        with _Watching():
            return self.build()


class _Watching(TorchFunctionMode):
    """Small tensors on the host have data in a prediction; large ones are followed from how they are made."""

    def __init__(self) -> None:
        super().__init__()
        self._known = Known()

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.dim() > 1 and is_fake(made):
            self._follow(getattr(func, "__name__", ""), args, kwargs, made)
        return made

    def _follow(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Tensor) -> None:
        self._known.note_made(name, args, kwargs, made)
        given = [self._known.get(arg) or arg for arg in args]
        if not any(isinstance(arg, Triangle) for arg in given):
            return
        if name == "to":  # moves do not change what it holds
            given = [arg for arg in given if not isinstance(arg, torch.device | str | bool)]
            kwargs = {key: value for key, value in kwargs.items() if key == "dtype"}
        if any(isinstance(value, Tensor) for value in (*given, *kwargs.values())):
            return
        triangle = after(name, given, kwargs)
        if triangle is not None and triangle.shape == tuple(made.shape) and triangle.dtype == made.dtype:
            self._known.put(made, triangle)
            if not triangle.is_uniform and triangle.shape[-1] == triangle.shape[-2]:
                setattr(made, _KNOWN, (triangle, version(made)))
