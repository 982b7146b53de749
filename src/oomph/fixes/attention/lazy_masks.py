"""Masks that are known to be triangles and are not in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oomph.fixes.attention.triangles import Triangle, after
from oomph.fixes.deferral.deferred import Arguments, Deferred, Options, call, changes_in_place

# Results that share memory with the mask: what is later written into one is seen in the other.
_SHARING = ("__getitem__", "view", "reshape", "expand", "unsqueeze", "contiguous", "detach")


class LazyMask(Deferred):
    def __init__(self, triangle: Triangle, device: torch.device) -> None:
        super().__init__()
        self._triangle, self._device = triangle, device
        self._stored: tuple[StoredMask, Callable[[Tensor], Tensor]] | None = None

    @property
    def triangle(self) -> Triangle:
        return self._triangle

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device if self._real is None else self._real.device

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.triangle.shape) if self._real is None else self._real.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.triangle.dtype if self._real is None else self._real.dtype

    requires_grad = False

    def _compute(self) -> Tensor:
        return self.triangle.tensor(self.device)

    def follow(self, name: str, func: Any, args: Arguments, kwargs: Options) -> Any:
        if changes_in_place(name, args, kwargs):
            self._share_stored()
            return NotImplemented
        if name in ("to", "cuda", "cpu", "type_as"):
            return self._moved(name, args, kwargs)
        given = [_as_triangle(arg) for arg in args]
        options = {key: _as_triangle(value) for key, value in kwargs.items()}
        if any(isinstance(value, Tensor | Deferred) for value in (*given, *options.values())):
            return NotImplemented
        triangle = after(name, given, options)
        if triangle is None:
            return NotImplemented
        child = LazyMask(triangle, self.device)
        if name in _SHARING:
            return self.add_view(child, partial(_replay, func, tuple(args[1:]), dict(kwargs)))
        return child

    def _share_stored(self) -> None:
        """Before a change in place: if it is a part of a stored mask, be that part indeed."""
        root: Any = self
        while root._view_of is not None:
            root = root._view_of[0]
        if root._stored is not None:
            stored, view = root._stored
            root._real = view(stored.restored())

    def _moved(self, name: str, args: Arguments, kwargs: Options) -> Any:
        """`.to` in any of its forms."""
        device, dtype = self.device, self.dtype
        for value in (*args[1:], *kwargs.values()):
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, Tensor | Deferred):
                device, dtype = value.device, value.dtype
            elif isinstance(value, str | torch.device | int) and not isinstance(value, bool):
                device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
        if name == "cpu" or (name == "cuda" and device.type != "cuda"):
            device = torch.device(name)
        if dtype == self.dtype and _same_device(device, self.device) and not kwargs.get("copy"):
            return self
        return LazyMask(self.triangle.with_pair(self.triangle.pair.to(dtype)), device)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def _as_triangle(value: Any) -> Any:
    """A mask as what it holds."""
    if isinstance(value, LazyMask) and not value.is_real:
        return value.triangle
    return value


def _replay(func: Any, args: Arguments, kwargs: Options, base: Tensor) -> Tensor:
    return func(base, *args, **kwargs)


class StoredMask(LazyMask):
    """In the place of a module's buffer; the buffer itself has become empty.

    The empty buffer moves with the module, and tells on which device and in which dtype the mask would be.
    """

    def __init__(self, triangle: Triangle, owner: nn.Module, name: str) -> None:
        super().__init__(triangle, torch.device("cpu"))
        self._owner, self.name = owner, name

    @property
    def triangle(self) -> Triangle:
        dtype = self.anchor.dtype
        if dtype == self._triangle.dtype:
            return self._triangle
        return self._triangle.with_pair(self._triangle.pair.to(dtype))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.anchor.device

    @property
    def anchor(self) -> Tensor:
        anchor = self._owner._buffers[self.name]
        assert anchor is not None
        return anchor

    @property
    def is_in_place(self) -> bool:
        """Does the module still have it, rather than a buffer?"""
        return vars(self._owner).get(self.name) is self

    def restored(self) -> Tensor:
        """The module writes into its mask: it becomes a buffer again."""
        if self.is_in_place:
            del vars(self._owner)[self.name]
            self._owner._buffers[self.name] = self._compute()
        return self.anchor

    def follow(self, name: str, func: Any, args: Arguments, kwargs: Options) -> Any:
        if changes_in_place(name, args, kwargs) and args and args[0] is self:
            return call(func, (self.restored(), *args[1:]), kwargs)
        return super().follow(name, func, args, kwargs)

    def add_view(self, child: Deferred, view: Callable[[Tensor], Tensor]) -> Any:
        assert isinstance(child, LazyMask)
        child._stored = (self, view)  # not by the child's real(): that would make the whole for a part
        return child

    def real(self) -> Tensor:
        return self._compute()  # not to be kept: that is what takes the memory
