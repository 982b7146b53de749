"""One storage that is kept for backward on the host."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from oomph.fixes.host_copies.lanes import Done, Lanes
from oomph.fixes.host_copies.pinned import PinnedPool


class Kept:
    """A storage: on the device, on its way to the host, there, or back. Backward takes it once per save.

    The copy to the host starts at once. `leave` frees the device's memory, `come_back` allocates it anew:
    both at moments that the program's order fixes, not the speed of copies.
    """

    def __init__(self, tensor: torch.Tensor, lanes: Lanes, pool: PinnedPool) -> None:
        storage = tensor.untyped_storage()
        self.saves = self._to_take = 0
        self._storage, self._version = StorageWeakRef(storage), tensor._version
        self._lanes, self._pool = lanes, weakref.ref(pool)
        self._bytes = storage.nbytes()
        self._pinned = lanes.device.type == "cuda"
        self._host = pool.take(self._bytes, self._pinned)
        self._on_device: torch.Tensor | None = _bytes_of(tensor)
        self._original = True  # what is on the device is the program's own, not a copy that came back
        self._out: Done = lanes.copy_out(self._copy_out)
        self._back: Done = None
        self._written_over = False

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is this one, with the data it had.

        The storage's address alone would not tell: it may be another's by now.
        """
        return not self._storage.expired() and tensor._version == self._version

    def save(self, tensor: torch.Tensor) -> Saved:
        self.saves += 1
        self._to_take += 1
        shape, stride = tuple(tensor.shape), tensor.stride()
        return Saved(self, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def leave(self) -> None:
        """Free the device's memory; what the current stream does from here on comes after the copy."""
        self._lanes.wait(self._out)
        self._check()
        self._on_device = None

    def come_back(self) -> None:
        """Allocate memory on the device and start to copy into it, unless it is there."""
        if self._on_device is None:
            self._on_device = torch.empty(self._bytes, dtype=torch.uint8, device=self._lanes.device)
            self._original = False
            self._back = self._lanes.copy_back(self._copy_back, self._out)
            self._to_take = self.saves

    def take(self) -> torch.Tensor:
        """Its bytes on the device. After as many times as it was saved, they are the caller's alone."""
        self.come_back()
        self._check()
        if self._written_over:
            raise _written_over(f"{self._bytes} bytes that wait for backward on the host")
        taken = self._on_device
        assert taken is not None
        self._lanes.wait(self._back)
        self._back = None
        self._to_take -= 1
        if self._to_take <= 0:
            self.leave()
        return taken

    def _check(self) -> None:
        """As autograd does: was the memory written to while it waited, perhaps while it was copied?"""
        if self._original and self._on_device is not None and self._on_device._version != self._version:
            self._written_over = True

    def _copy_out(self) -> None:
        assert self._on_device is not None
        for piece, part in self._parts(self._on_device):
            piece.copy_(part, non_blocking=True)

    def _copy_back(self) -> None:
        assert self._on_device is not None
        for piece, part in self._parts(self._on_device):
            part.copy_(piece, non_blocking=True)

    def _parts(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts, start = [], 0
        for piece in self._host:
            part = flat[start : start + piece.numel()]
            parts.append((piece[: part.numel()], part))
            start += piece.numel()
        return parts

    def __del__(self) -> None:
        # Fetched and never taken: the copy must not write into memory that is another's by then.
        if getattr(self, "_back", None) is not None:
            self._lanes.wait(self._back)
        pool = self._pool() if hasattr(self, "_pool") else None
        if pool is not None and hasattr(self, "_host"):
            pool.give_back(self._host, self._pinned)


class Saved(NamedTuple):
    """What autograd holds instead of a tensor: how the tensor lies in the storage that is kept."""

    kept: Kept
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        flat = self.kept.take()
        usable = flat.numel() - flat.numel() % self.dtype.itemsize
        return flat[:usable].view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class Here(NamedTuple):
    """What autograd holds instead of a tensor that stays on the device."""

    kept: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        if self.kept._version != self.version:
            raise _written_over(f"a tensor of shape {tuple(self.kept.shape)}")
        return self.kept


def _written_over(what: str) -> RuntimeError:
    """autograd's own error, which it cannot raise for what it does not hold itself."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        + what
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage; saved views of it lie anywhere in it."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((elements,), (1,), 0).view(torch.uint8)
