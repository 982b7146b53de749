"""A corpus: parts (files) that are cut into blocks, read one block at a time, in any order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol


class Part(Protocol):
    """One file, or one table: `blocks` pieces that can be read in any order."""

    @property
    def blocks(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes, or the nearest thing that is known without reading."""
        ...

    def read(self, block: int) -> Iterator[str]:
        """The documents of a block. Opens, seeks, closes: nothing is kept between calls."""
        ...


class Corpus:
    """Blocks of all parts, numbered through. Memory grows with the number of files, not with their size."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        self.parts = tuple(parts)
        self._ends = list(accumulate(part.blocks for part in self.parts))
        self.size = sum(part.size for part in self.parts)

    @property
    def blocks(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, block: int) -> Iterator[str]:
        which = bisect_right(self._ends, block)
        before = self._ends[which - 1] if which else 0
        return self.parts[which].read(block - before)
