"""The caching allocator with expandable_segments:True: one arena per pool, growing page by page.

An arena is a stretch of addresses with room for everything. Memory is mapped into it in whole pages where a
request needs it, at the lowest address that has room, and is unmapped only when the cache is emptied or the
device is full. Requests are served from the mapped part by best fit, as ever. The rules are those of
c10/cuda/CUDACachingAllocator.cpp in torch 2.11.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from oomph.prediction.allocator import (
    ADDRESS_BITS,
    FIRST_ADDRESS,
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    OutOfMemory,
    Pool,
    Segment,
    absorb_next,
    round_up,
    view,
)

_ARENA = 2**36 * 20  # bytes of address space: a multiple of both page sizes, and more than any device has


class _Arena(Pool):
    """A pool whose blocks all lie in one arena. What is not mapped is a gap: a block that counts as handed
    out, so that free neighbours do not join it."""

    __slots__ = ("base", "first", "gaps", "page")

    def __init__(self, page: int, base: int, max_split: int | None) -> None:
        super().__init__(0, max_split)  # split down to 512 bytes, in both pools
        self.page = page
        self.base = base
        self.first = Block(base, _ARENA, self)
        self.first.allocated, self.first.mapped = True, False
        self.gaps = [self.first]  # by address

    def find(self, size: int) -> int | None:
        """Of free blocks that can grow, it is what they can grow to that counts for the best fit."""
        index = bisect_left(self.keys, size << ADDRESS_BITS)
        if index == len(self.keys):
            return None
        room = self._room_from(self.blocks[self.keys[index]])
        while index + 1 < len(self.keys):
            larger = self._room_from(self.blocks[self.keys[index + 1]])
            if larger >= room:
                break
            index, room = index + 1, larger
        return index

    def growing_from(self, size: int) -> Block:
        """The lowest gap, or free block before a gap, from which `size` bytes can be had by mapping gaps."""
        for gap in self.gaps:
            start = gap.prev if gap.prev is not None and not gap.prev.allocated else gap
            block: Block | None = start
            found = 0
            while found < size and block is not None and not (block.allocated and block.mapped):
                found += block.size
                block = block.next
            if found >= size:
                return start
        raise AssertionError("an arena has room for everything")

    def map(self, gap: Block, size: int) -> Block:
        """The first `size` bytes of a gap become a free block, joined with the free blocks next to it."""
        self._remove_gap(gap)
        block = Block(gap.address, size, self, gap.prev, gap)
        self._link(block)
        gap.address += size
        gap.size -= size
        if gap.size:
            self._add_gap(gap)
        else:
            absorb_next(block)
        return self._add_joined(block)

    def unmap(self, block: Block) -> tuple[int, int]:
        """Whole pages of a free block become a gap; returns where, and how many bytes."""
        start = self.base + round_up(block.address - self.base, self.page)
        end = block.address + block.size
        end -= (end - self.base) % self.page
        if start >= end:
            return start, 0
        self.remove(block)
        if block.address < start:
            rest = Block(start, block.size - (start - block.address), self, block, block.next)
            block.size = start - block.address
            self._link(rest)
            self.add(block)
            block = rest
        if end < block.address + block.size:
            after = Block(end, block.address + block.size - end, self, block, block.next)
            block.size = end - block.address
            self._link(after)
            self.add(after)
        block.allocated, block.mapped = True, False
        before = block.prev
        if before is not None and not before.mapped:
            self._remove_gap(before)
            absorb_next(before)
            block = before
        following = block.next
        if following is not None and not following.mapped:
            self._remove_gap(following)
            absorb_next(block)
        self._add_gap(block)
        return start, end - start

    def _room_from(self, block: Block) -> int:
        following = block.next
        return block.size + (following.size if following is not None and not following.mapped else 0)

    def _add_joined(self, block: Block) -> Block:
        before, after = block.prev, block.next
        if before is not None and not before.allocated:
            self.remove(before)
            absorb_next(before)
            block = before
        if after is not None and after.size and not after.allocated:
            self.remove(after)
            absorb_next(block)
        self.add(block)
        return block

    def _link(self, block: Block) -> None:
        if block.prev is None:
            self.first = block
        else:
            block.prev.next = block
        if block.next is not None:
            block.next.prev = block

    def _remove_gap(self, gap: Block) -> None:
        self.gaps.remove(gap)

    def _add_gap(self, gap: Block) -> None:
        insort(self.gaps, gap, key=lambda one: one.address)


class ExpandableAllocator(CachingAllocator):
    """Serves requests as PyTorch does with expandable segments.

    `on_segment` receives ("segment_map" or "segment_unmap", address, size).
    """

    def _new_pools(self) -> tuple[_Arena, _Arena]:
        base = FIRST_ADDRESS + 2 * len(self._pools) * _ARENA
        return (
            _Arena(SMALL_SEGMENT, base, self._max_split),
            _Arena(LARGE_SEGMENT, base + _ARENA, self._max_split),
        )

    def _arenas(self) -> Iterator[_Arena]:
        for pools in self._pools.values():
            for arena in pools:
                assert isinstance(arena, _Arena)
                yield arena

    def empty_cache(self) -> None:
        self.synchronize()
        for arena in self._arenas():
            for block in [arena.blocks[key] for key in arena.keys]:
                address, size = arena.unmap(block)
                self.reserved -= size
                if size and self._on_segment is not None:
                    self._on_segment("segment_unmap", address, size)

    def segments(self) -> list[Segment]:
        """Every mapped stretch and its blocks, by address."""
        found = []
        for arena in self._arenas():
            block: Block | None = arena.first
            stretch: list[Block] = []
            while block is not None:
                if block.mapped:
                    stretch.append(block)
                elif stretch:
                    found.append(view(stretch))
                    stretch = []
                block = block.next
            if stretch:
                found.append(view(stretch))
        return found

    def _new_segment(self, size: int, nbytes: int, pool: Pool) -> Block:
        assert isinstance(pool, _Arena)
        block = self._grown(size, pool)
        if block is None:
            self.empty_cache()
            block = self._grown(size, pool)
        if block is None:
            raise OutOfMemory(nbytes, round_up(size, pool.page))
        pool.remove(block)
        return block

    def _grown(self, size: int, arena: _Arena) -> Block | None:
        """A free block of at least `size` bytes, after mapping what it lacks; None: the limit forbids it."""
        start = arena.growing_from(size)
        block = start if start.mapped else self._map(start, size, arena)
        while block is not None and block.size < size:
            assert block.next is not None
            block = self._map(block.next, size - block.size, arena)
        return block

    def _map(self, gap: Block, size: int, arena: _Arena) -> Block | None:
        mapped = round_up(min(size, gap.size), arena.page)
        if self.limit is not None and self.reserved + mapped > self.limit:
            return None
        self.reserved += mapped
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self._on_segment is not None:
            self._on_segment("segment_map", gap.address, mapped)
        return arena.map(gap, mapped)
