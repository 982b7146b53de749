"""When tensors go to the host and come back, by the order in which blocks run.

A tensor that a block saves is copied to the host at once. The device's memory is freed when the block after
it has ended: its computation has hidden the copy. In backward, a block's memory is allocated and the copy
started when the block after it begins, or, without `ahead`, when it begins itself, which waits for the copy.
The last block's tensors stay: backward begins with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from oomph.fixes.host_copies.kept import Here, Kept, Saved
from oomph.fixes.host_copies.lanes import Lanes
from oomph.fixes.host_copies.pinned import PinnedPool

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class HostCopies:
    """What the blocks of one model share. A copy of the model has its own, and nothing in it."""

    def __init__(self, smallest: int, ahead: bool = True) -> None:
        self.smallest, self.ahead = smallest, ahead
        self.pool = PinnedPool()
        self._lanes: dict[torch.device, Lanes] = {}
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
        self._latest: weakref.ref[Visit] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return HostCopies, (self.smallest, self.ahead)

    def visit(self, stays: bool, left_alone: Collection[torch.Tensor]) -> Visit:
        """A block begins. `stays`: what it saves is not copied. `left_alone`: its parameters and buffers."""
        visit = Visit(self, stays, left_alone, self._latest)
        self._latest = weakref.ref(visit)
        return visit

    def keep(self, tensor: torch.Tensor) -> Kept:
        """The storage of the tensor, on its way to the host; the same for all tensors that lie in it."""
        key = tensor.untyped_storage()._cdata
        kept = self._kept.get(key)
        if kept is None or not kept.is_of(tensor):
            lanes = self._lanes.setdefault(tensor.device, Lanes(tensor.device))
            kept = self._kept[key] = Kept(tensor, lanes, self.pool)
        return kept


class Visit:
    """One run of a block's forward, and of its backward. The graph that the forward makes holds it."""

    def __init__(
        self,
        copies: HostCopies,
        stays: bool,
        left_alone: Collection[torch.Tensor],
        before: weakref.ref[Visit] | None,
    ) -> None:
        self._copies = copies
        self._stays = stays
        self._left_alone = {tensor.untyped_storage()._cdata for tensor in left_alone}
        self._device = next((tensor.device for tensor in left_alone), None)
        self._before = before
        self._kept: list[weakref.ref[Kept]] = []
        self._in_backward = False

    def saving(self) -> torch.autograd.graph.saved_tensors_hooks:
        """What is saved for backward inside goes to the host."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def end(self) -> None:
        """The block has ended, so the one before it has had the time to be copied."""
        before = self._block_before()
        if before is not None:
            for kept in before._alive():
                kept.leave()

    def _pack(self, tensor: torch.Tensor) -> Here | Saved:
        with torch.no_grad():
            if self._stays or not self._may_go(tensor):
                # Detached: an op's own result would hold the op, and the op it.
                return Here(tensor.detach(), tensor._version)
            kept = self._copies.keep(tensor)
            if not any(known() is kept for known in self._kept):
                self._kept.append(weakref.ref(kept))
            return kept.save(tensor)

    def _unpack(self, saved: Here | Saved) -> torch.Tensor:
        with torch.no_grad():
            if not self._in_backward:
                self._begin_backward()
            return saved.tensor()

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._come_back()  # is on its way already, unless blocks ran in an order of their own
        before = self._block_before()
        if before is not None and self._copies.ahead:
            before._come_back()

    def _come_back(self) -> None:
        for kept in reversed(self._alive()):  # the last that was saved is needed first
            kept.come_back()

    def _alive(self) -> list[Kept]:
        return [kept for known in self._kept if (kept := known()) is not None]

    def _block_before(self) -> Visit | None:
        return None if self._before is None else self._before()

    def _may_go(self, tensor: torch.Tensor) -> bool:
        """Large, plain, where the block computes, and no parameter or view of one."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return False
        if self._device is not None and tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._copies.smallest and storage._cdata not in self._left_alone
