"""Memory that is used again within a call.

A CPU's allocator gives freed memory back to the system, and touching new pages costs about as much as the
arithmetic on them: with one temporary after the other a fifth of a call's time went there.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16  # numbers: a cache line of float32


@dataclass(frozen=True)
class _Part:
    """Of block number `block`, the numbers from `start` to before `stop`."""

    block: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Buffers:
    """Tensors of one dtype and device, uninitialised, for segments that all ask for the same ones in turn.

    The first segment decides what lies where; later ones that are no larger find theirs in the same places.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._like, self.dtype = like, dtype
        self._chunks, self._asked = 0, 0
        self._places: list[_Part] = []  # of what was asked for, in that order
        self._forget()

    def _forget(self) -> None:
        self._places.clear()
        self._blocks: list[Tensor] = []
        self._free: list[_Part] = []
        self._used: dict[int, tuple[Tensor, _Part]] = {}  # by the id of the tensor, which it holds on to

    def begin(self, chunks: int) -> None:
        """Of a segment of so many chunks: all that was given before may be given again."""
        self._used.clear()
        self._asked = 0
        if chunks > self._chunks:
            self._forget()
            self._chunks = chunks

    def new(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        known = self._asked < len(self._places)
        if not known:
            self._places.append(self._take(-(-count // _ALIGNMENT) * _ALIGNMENT))
        part = self._places[self._asked]
        self._asked += 1
        made = self._blocks[part.block][part.start : part.start + count].view(shape)
        if not known:
            self._used[id(made)] = made, part
        return made

    def zeros(self, *shape: int) -> Tensor:
        return self.new(*shape).zero_()

    def free(self, *tensors: Tensor) -> None:
        """What `new` gave, itself and not a view of it, may be given again."""
        for tensor in tensors:
            if id(tensor) in self._used:
                self._put_back(self._used.pop(id(tensor))[1])

    def _take(self, count: int) -> _Part:
        """From the smallest free part that is large enough, or else a block of its own."""
        fitting = [part for part in self._free if part.size >= count]
        if not fitting:
            self._blocks.append(self._like.new_empty(count, dtype=self.dtype))
            return _Part(len(self._blocks) - 1, 0, count)
        found = min(fitting, key=lambda part: part.size)
        self._free.remove(found)
        if found.size > count:
            self._free.append(_Part(found.block, found.start + count, found.stop))
        return _Part(found.block, found.start, found.start + count)

    def _put_back(self, part: _Part) -> None:
        """Joined with the free parts beside it."""
        beside = [
            other
            for other in self._free
            if other.block == part.block and (other.stop == part.start or other.start == part.stop)
        ]
        for other in beside:
            self._free.remove(other)
            part = _Part(part.block, min(part.start, other.start), max(part.stop, other.stop))
        self._free.append(part)
