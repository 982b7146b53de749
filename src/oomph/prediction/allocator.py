"""PyTorch's CUDA caching allocator, without CUDA: the same blocks for the same requests, to the byte.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in torch 2.11, for one device, without rounding to
powers of two and garbage collection. Every stream has pools of its own: a block is reused on the stream that
allocated it.

Where cudaMalloc puts a segment decides between free blocks of equal size. The driver takes addresses in
chunks of 32 MiB, each below the earlier ones, and puts later segments into what is left of a chunk. At times
it finds room above, which cannot be foreseen: `rising` places every segment above the earlier ones, and the
two orders show how much `reserved` depends on addresses. (Of 12 recorded runs on an H200, all replay to the
exact reserved bytes with the recorded addresses, and 8 with falling ones.)

With expandable_segments:True there is one arena per pool, growing page by page: a stretch of addresses with
room for everything. Memory is mapped into it in whole pages where a request needs it, at the lowest address
that has room, and is unmapped only when the cache is emptied or the device is full. Requests are served from
the mapped part by best fit, as ever.
"""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from operator import itemgetter
from typing import Literal, NamedTuple

from oomph.errors import UserError
from oomph.gpus import GPU
from oomph.records import (
    CUDNN_SEARCH,
    Alive,
    Allocation,
    AllocatorSettings,
    Event,
    Moment,
    StepPeak,
    alive_after,
)
from oomph.units import MiB

MIN_BLOCK = 512  # every request is rounded up to a multiple of this
SMALL_REQUEST = 1 * MiB  # the largest request that the small pool serves
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT = 20 * MiB  # shared by requests above SMALL_REQUEST and below OWN_SEGMENT
OWN_SEGMENT = 10 * MiB  # from here on a request gets a segment of its own size ...
SEGMENT_STEP = 2 * MiB  # ... rounded up to a multiple of this
OVERSIZE_SLACK = 20 * MiB  # a request that may not split a block takes one that is less than this larger

ADDRESS_CHUNK = 32 * MiB  # of addresses that the driver takes at a time
FIRST_ADDRESS = 0x7F00_0000_0000  # about where CUDA's addresses lie
ADDRESS_BITS = 52  # a petabyte of segments, and exact in viewers that count in doubles

SegmentListener = Callable[[str, int, int], None]


class OutOfMemory(Exception):
    """A request that does not fit the limit, even after every unused segment was given back."""


class Block:
    """A stretch of one segment, handed out or free. `prev` and `next` are its neighbours in the segment."""

    __slots__ = ("address", "allocated", "mapped", "next", "pool", "prev", "recorded", "size")

    def __init__(
        self, address: int, size: int, pool: Pool, prev: Block | None = None, next: Block | None = None
    ) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.allocated = False
        self.recorded = False  # Tensor.record_stream was called: another stream uses it as well
        self.mapped = True  # only expandable segments have stretches without memory behind them
        self.prev = prev
        self.next = next


class Pool:
    """Free blocks in the order of best fit: by size, then by address.

    Both are packed into one integer, because a sorted list of integers is searched several times faster than
    one of tuples or blocks, and replays spend most of their time here.
    """

    __slots__ = ("blocks", "keys", "max_split", "split_below", "unsplit")

    def __init__(self, unsplit: int, max_split: int | None, split_below: int = sys.maxsize) -> None:
        self.unsplit = unsplit  # the largest remainder that stays with the block it would be split from
        self.split_below = split_below  # only smaller requests split a block
        self.max_split = max_split  # blocks of this size or more are kept for requests of that size
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        self.blocks[key] = block
        insort(self.keys, key)

    def remove(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        del self.blocks[key]
        del self.keys[bisect_left(self.keys, key)]

    def take(self, size: int) -> Block | None:
        """The smallest block of at least `size` bytes, removed; of equals, the one at the lowest address."""
        index = self.find(size)
        if index is None or (self.max_split is not None and not self._may_take(size, index, self.max_split)):
            return None
        return self.blocks.pop(self.keys.pop(index))

    def find(self, size: int) -> int | None:
        index = bisect_left(self.keys, size << ADDRESS_BITS)
        return None if index == len(self.keys) else index

    def _may_take(self, size: int, index: int, max_split: int) -> bool:
        found = self.keys[index] >> ADDRESS_BITS
        return found < max_split if size < max_split else found < size + OVERSIZE_SLACK


def round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def segment_size(size: int) -> int:
    """The size of the new segment for a rounded request that no cached block can serve."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return round_up(size, SEGMENT_STEP)


class CachingAllocator:
    """Serves requests as PyTorch does, reserving at most `limit` bytes (None: no limit).

    `allocated` counts whole blocks, so a request served by a block that was not split counts as all of it;
    `reserved` counts segments. Blocks of `max_split` bytes or more are not split (None: all may be).
    `on_segment` receives ("segment_alloc" or "segment_free", address, size). `rising`: see above.
    """

    def __init__(
        self,
        limit: int | None = None,
        *,
        max_split: int | None = None,
        on_segment: SegmentListener | None = None,
        rising: bool = False,
    ) -> None:
        self.limit = limit
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self.released = 0  # segments, or pages of expandable ones, to stay within the limit
        self._on_segment = on_segment
        self._max_split = max_split
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # of every stream: for small and for large requests
        self._waiting: list[Block] = []  # freed, but perhaps still in use on another stream
        self._rising = rising
        self._edge = FIRST_ADDRESS  # of the addresses that were taken so far
        self._gaps: dict[int, list[int]] = {}  # what is left of chunks: size -> addresses, a heap

    def _new_pools(self) -> tuple[Pool, Pool]:
        # No large request could use a smaller remainder than SMALL_REQUEST.
        split_below = sys.maxsize if self._max_split is None else self._max_split
        return Pool(0, self._max_split), Pool(SMALL_REQUEST, self._max_split, split_below)

    def malloc(self, nbytes: int, stream: int = 0) -> Block:
        """The block that serves a request; one of size 0, outside every segment, for a request of 0 bytes."""
        if nbytes == 0:
            block = Block(0, 0, Pool(0, None))
            block.allocated = True
            return block
        size = (nbytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        pools = self._pools.get(stream)
        if pools is None:
            pools = self._pools[stream] = self._new_pools()
        pool = pools[size > SMALL_REQUEST]
        block = pool.take(size) or self._new_segment(size, pool)

        if block.size - size > pool.unsplit and size < pool.split_below:
            pool.add(split(block, size))
        block.allocated = True
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool, joined with the free blocks next to it. Its segment stays reserved.

        A block that another stream uses as well counts as free at once, and is reused after `synchronize`.
        """
        self.allocated -= block.size
        if block.recorded:
            self._waiting.append(block)
        else:
            return_to_pool(block)

    def synchronize(self) -> None:
        """All streams have done their work. (torch queries the events of such blocks at every request: how
        far the GPU is behind the program, a trace cannot know.)"""
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            block.recorded = False
            return_to_pool(block)

    def empty_cache(self) -> int:
        """Give back every segment without an allocated block, as torch.cuda.empty_cache does: how many."""
        self.synchronize()
        released = 0
        for pool in (pool for pools in self._pools.values() for pool in reversed(pools)):
            for block in [pool.blocks[key] for key in pool.keys]:
                if block.prev is None and block.next is None:
                    self._release(block)
                    released += 1
        return released

    def reset_peak(self) -> None:
        """Start both peaks again from the current values, as torch.cuda.reset_peak_memory_stats does."""
        self.peak_allocated = self.allocated
        self.peak_reserved = self.reserved

    def _new_segment(self, size: int, pool: Pool) -> Block:
        needed = segment_size(size)
        if self.limit is not None and self.reserved + needed > self.limit:
            self._release_oversize(size, pool)
            if self.reserved + needed > self.limit:
                self.released += self.empty_cache()
                if self.reserved + needed > self.limit:
                    raise OutOfMemory(f"no room for a segment of {needed} bytes")
        block = Block(self._address(needed), needed, pool)
        self.reserved += needed
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved
        if self._on_segment is not None:
            self._on_segment("segment_alloc", block.address, needed)
        return block

    def _address(self, size: int) -> int:
        if self._rising:
            self._edge += size
            return self._edge - size
        rooms = [room for room, addresses in self._gaps.items() if room >= size and addresses]
        if rooms:
            room = min(rooms, key=lambda room: self._gaps[room][0])
            address = heappop(self._gaps[room])
        else:
            room = round_up(size, ADDRESS_CHUNK)
            self._edge -= room
            address = self._edge
        if room > size:
            heappush(self._gaps.setdefault(room - size, []), address + size)
        return address

    def _release_oversize(self, size: int, pool: Pool) -> None:
        """Give back blocks that no smaller request may use: one that is large enough, or else the largest
        ones until there is enough. (They are whole segments: they were never split.)"""
        if pool.max_split is None:
            return
        wanted = max(size, pool.max_split)
        index = bisect_left(pool.keys, wanted << ADDRESS_BITS)
        if index < len(pool.keys):
            self._release(pool.blocks[pool.keys[index]])
            self.released += 1
            return
        released = 0
        while released < wanted and pool.keys and pool.keys[-1] >> ADDRESS_BITS >= pool.max_split:
            block = pool.blocks[pool.keys[-1]]
            released += block.size
            self._release(block)
            self.released += 1

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size
        if self._on_segment is not None:
            self._on_segment("segment_free", block.address, block.size)


def return_to_pool(block: Block) -> Block:
    """The free block that it becomes, joined with the free ones next to it."""
    block.allocated = False
    if block.size == 0:
        return block
    pool = block.pool
    before = block.prev
    if before is not None and not before.allocated:
        pool.remove(before)
        absorb_next(before)
        block = before
    after = block.next
    if after is not None and not after.allocated:
        pool.remove(after)
        absorb_next(block)
    pool.add(block)
    return block


def split(block: Block, size: int) -> Block:
    """Cut a block after `size` bytes: the rest, which is in no pool yet."""
    rest = Block(block.address + size, block.size - size, block.pool, block, block.next)
    if block.next is not None:
        block.next.prev = rest
    block.next, block.size = rest, size
    return rest


def absorb_next(block: Block) -> None:
    gone = block.next
    assert gone is not None
    block.size += gone.size
    following = block.next = gone.next
    if following is not None:
        following.prev = block
    gone.prev = gone.next = None


# ---------------------------------------------------------------------------------------------- settings

_LEAST_SPLIT = 20  # MiB: torch refuses a max_split_size_mb that is not above it
# These decide about the host, about locks, or only when a memory fraction is set.
_WITHOUT_EFFECT = (
    "garbage_collection_threshold",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "release_lock_on_cudamalloc",
)
_MODELLED = ("expandable_segments", "max_split_size_mb")


def allocator_settings(text: str | None) -> AllocatorSettings:
    """The settings in a string as PYTORCH_CUDA_ALLOC_CONF takes it; None and "" are the defaults."""
    expandable, max_split = False, None
    for part in re.split(r",(?![^\[]*\])", text or ""):
        key, _, value = (word.strip() for word in part.partition(":"))
        if not key or key in _WITHOUT_EFFECT or (key, value) == ("backend", "native"):
            continue
        if key == "expandable_segments":
            if value not in ("True", "False"):
                raise _wrong(text, f"expandable_segments is {value!r}; valid: True, False")
            expandable = value == "True"
        elif key == "max_split_size_mb":
            if not value.isdecimal() or int(value) <= _LEAST_SPLIT:
                valid = f"a whole number above {_LEAST_SPLIT}"
                raise _wrong(text, f"max_split_size_mb is {value!r}; valid: {valid}")
            max_split = int(value) * MiB
        else:
            raise _wrong(text, f"{key!r} cannot be predicted; valid: {', '.join(_MODELLED)}")
    return AllocatorSettings(expandable, max_split)


def _wrong(text: str | None, why: str) -> UserError:
    return UserError(f"allocator={text!r}: {why}")


# ---------------------------------------------------------------------------------------- expandable segments

_ARENA = 2**36 * 20  # bytes of address space: a multiple of both page sizes, and more than any device has


class _Arena(Pool):
    """A pool whose blocks all lie in one arena. What is not mapped is a gap: a block that counts as handed
    out, so that free neighbours do not join it."""

    __slots__ = ("base", "gaps", "page")

    def __init__(self, page: int, base: int, max_split: int | None) -> None:
        super().__init__(0, max_split)  # split down to 512 bytes, in both pools
        self.page = page
        self.base = base
        self.gaps: list[Block] = []  # by address
        self._add_gap(Block(base, _ARENA, self))

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
        self.gaps.remove(gap)
        if size < gap.size:
            self._add_gap(split(gap, size))
        gap.mapped = True
        return return_to_pool(gap)

    def unmap(self, block: Block) -> tuple[int, int]:
        """Whole pages of a free block become a gap; returns where, and how many bytes."""
        start = self.base + round_up(block.address - self.base, self.page)
        end = block.address + block.size
        end -= (end - self.base) % self.page
        if start >= end:
            return start, 0
        self.remove(block)
        if block.address < start:
            rest = split(block, start - block.address)
            self.add(block)
            block = rest
        if end < block.address + block.size:
            self.add(split(block, end - block.address))
        before = block.prev
        if before is not None and not before.mapped:
            self.gaps.remove(before)
            absorb_next(before)
            block = before
        following = block.next
        if following is not None and not following.mapped:
            self.gaps.remove(following)
            absorb_next(block)
        self._add_gap(block)
        return start, end - start

    def _room_from(self, block: Block) -> int:
        following = block.next
        return block.size + (following.size if following is not None and not following.mapped else 0)

    def _add_gap(self, gap: Block) -> None:
        gap.allocated, gap.mapped = True, False
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

    def empty_cache(self) -> int:
        """Unmap every page without an allocated block: how many."""
        self.synchronize()
        released = 0
        for arena in itertools.chain(*self._pools.values()):
            assert isinstance(arena, _Arena)
            for block in [arena.blocks[key] for key in arena.keys]:
                address, size = arena.unmap(block)
                self.reserved -= size
                released += size // arena.page
                if size and self._on_segment is not None:
                    self._on_segment("segment_unmap", address, size)
        return released

    def _new_segment(self, size: int, pool: Pool) -> Block:
        assert isinstance(pool, _Arena)
        block = self._grown(size, pool)
        if block is None:
            self.released += self.empty_cache()
            block = self._grown(size, pool)
        if block is None:
            raise OutOfMemory(f"no room for {size} bytes")
        pool.remove(block)
        return block

    def _grown(self, size: int, arena: _Arena) -> Block | None:
        """A free block of at least `size` bytes, after mapping what it lacks; None: the limit forbids it.

        torch compares the whole request with a limit set by set_per_process_memory_fraction, also where a
        part of it is mapped. A card that is full refuses only what is mapped. The stricter of the two is
        applied.
        """
        if self.limit is not None and self.reserved + segment_size(size) > self.limit:
            return None
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


# ----------------------------------------------------------------------------------------------------- replay

# Events through the allocator: what a run's allocations and frees come to, in milliseconds.

_STEP_MARK = re.compile(r"step (\d+)")


class TraceEntry(NamedTuple):
    """One act of the allocator, with addresses: what a memory snapshot is written from."""

    action: Literal["alloc", "free", "segment_alloc", "segment_free", "segment_map", "segment_unmap"]
    address: int
    bytes: int  # of the block or the segment
    id: int  # the Allocation that caused it


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator did with the events.

    The peaks are those of the steps, as `torch.cuda.reset_peak_memory_stats` at the start of every step makes
    them; without a step mark, those of the whole run. After a refused request nothing more is replayed.
    """

    peak_allocated: int
    peak_reserved: int
    peak_event: int  # index of the event after which `peak_allocated` is first reached; -1 if there is none
    peak_step: int  # 0 when there are no step marks
    steps: tuple[StepPeak, ...]
    at_peak: tuple[Alive, ...]  # largest first; the bytes add up to peak_allocated
    timeline: tuple[Moment, ...]  # one per allocation and free
    highest_reserved: int  # of the whole run, set-up included: what it takes never to release a segment
    refused: int | None  # id of the Allocation that did not fit the limit
    released: int  # segments, or pages of expandable ones, in the last step, to stay within the limit
    smaller_workspaces: bool  # of convolutions, to stay within the limit
    trace: tuple[TraceEntry, ...] = ()  # empty unless asked for


def replay(
    events: Sequence[Event],
    allocations: Sequence[Allocation],
    limit: int | None = None,
    *,
    settings: AllocatorSettings | None = None,
    record: bool = False,
    rising: bool = False,
    search: bool = True,
    smaller_workspaces: bool = True,
) -> Replay:
    """Run the events through a fresh allocator that may reserve `limit` bytes (None: as many as it likes).

    `allocations` is indexed by id. `record` keeps every act of the allocator in `Replay.trace`. `rising`
    places segments at rising addresses, see above; it changes nothing for expandable segments.
    `search=False` leaves out what cuDNN's search for algorithms takes. A workspace of a convolution that does
    not fit is left out: torch takes cuDNN's next algorithm then (ATen/native/cudnn/Conv_v8.cpp), down to
    those that need little or none. It is refused without `smaller_workspaces`.
    An event that contradicts those before it raises ValueError with its index.
    """
    trace: list[TraceEntry] = []
    requester = -1

    def on_segment(action: str, address: int, size: int) -> None:
        trace.append(TraceEntry(action, address, size, requester))  # type: ignore[arg-type]

    settings = settings or AllocatorSettings()
    kind = ExpandableAllocator if settings.expandable_segments else CachingAllocator
    listener = on_segment if record else None
    allocator = kind(limit, max_split=settings.max_split, on_segment=listener, rising=rising)
    malloc, free = allocator.malloc, allocator.free
    alive: dict[int, Block] = {}
    states: list[tuple[int, int, int]] = []
    steps = _Steps(allocator)
    refused: int | None = None
    left_out = False

    for index, (action, id, label) in enumerate(events):
        if action == "alloc":
            if id in alive:
                raise ValueError(f"event {index}: alloc of allocation {id}, which is alive")
            requester = id
            one = allocations[id]
            try:
                size = one.bytes if search or one.op != CUDNN_SEARCH else 0
                block = alive[id] = malloc(size, one.stream)
                if record and block.size:
                    trace.append(TraceEntry("alloc", block.address, block.size, id))
            except OutOfMemory:
                if not (smaller_workspaces and is_convolution_workspace(one)):
                    refused = id
                    break
                alive[id], left_out = malloc(0, one.stream), True
        elif action == "free":
            if id not in alive:
                raise ValueError(f"event {index}: free of allocation {id}, which is not alive")
            block = alive.pop(id)
            if record and block.size:
                trace.append(TraceEntry("free", block.address, block.size, id))
            free(block)
            if allocations[id].op == CUDNN_SEARCH:  # torch empties the cache after it
                allocator.empty_cache()
        else:
            if (step := _STEP_MARK.fullmatch(label)) is not None:
                allocator.synchronize()  # the host runs ahead of the GPU by less than a step
                steps.begin(int(step[1]), index)
            elif label == "empty_cache":
                allocator.empty_cache()
            elif label == "synchronize":
                allocator.synchronize()
            elif label == "record_stream":
                alive[id].recorded = True
            continue
        states.append((index, allocator.allocated, allocator.reserved))

    steps.end()
    timeline = tuple(map(partial(tuple.__new__, Moment), states))  # its own constructor takes far longer
    peak_event = steps.peak_event(timeline)
    (alive_at_peak,) = alive_after(events, timeline, [peak_event])
    largest_first = sorted(alive_at_peak.items(), key=lambda item: (-item[1], item[0]))
    return Replay(
        peak_allocated=steps.highest.allocated,
        peak_reserved=max(step.reserved for step in steps.peaks),
        peak_event=peak_event,
        peak_step=steps.highest.step,
        steps=tuple(steps.peaks) if steps.marked else (),
        at_peak=tuple(Alive(size, allocations[id]) for id, size in largest_first if size),
        timeline=timeline,
        highest_reserved=max(map(itemgetter(2), states), default=0),
        refused=refused,
        released=steps.released,
        smaller_workspaces=left_out,
        trace=tuple(trace),
    )


class _Steps:
    """The peaks of the steps, taken as a measuring program takes them. Before any mark: one "step 0"."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.peaks: list[StepPeak] = []
        self.marked = False
        self.released = 0  # in the last step that allocates: a function may end after its last one
        self._released_before = 0
        self._allocator = allocator
        self._step = 0
        self._starts: list[Moment] = [Moment(-1, 0, 0)]

    @property
    def highest(self) -> StepPeak:
        return max(self.peaks, key=lambda peak: peak.allocated)  # the first of equals

    def begin(self, step: int, event: int) -> None:
        allocator = self._allocator
        start = Moment(event, allocator.allocated, allocator.reserved)
        if not self.marked and step == 1:  # before it is set-up: measured peaks do not contain it
            self._starts = [start]
        else:  # in a function's own loop the first mark is at the end of step 1
            self._step = self._step or step - 1
            self.end()
            self._starts.append(start)
        self.marked = True
        self._step = step
        self._released_before = allocator.released
        allocator.reset_peak()

    def end(self) -> None:
        allocator = self._allocator
        self.peaks.append(
            StepPeak(self._step, allocator.peak_allocated, allocator.peak_reserved, allocator.allocated)
        )
        if allocator.peak_allocated > self._starts[-1].allocated:
            self.released = allocator.released - self._released_before

    def peak_event(self, timeline: Sequence[Moment]) -> int:
        """The event after which the highest peak is first reached: a step's own mark, if it starts there."""
        highest = self.highest
        start = self._starts[self.peaks.index(highest)]
        if start.allocated == highest.allocated:
            return start.event
        return next(
            event
            for event, allocated, _ in timeline
            if allocated == highest.allocated and event > start.event
        )


def is_convolution_workspace(one: Allocation) -> bool:
    return one.kind == "workspace" and one.op.startswith("aten.convolution")


# ----------------------------------------------------------------------------------------------------- margin

# How far the predicted `reserved` may be off, as a share of it. `python -m benchmarks.accuracy.margins`
# compares predicted and measured `reserved` (benchmarks/results/margins.csv). The shares of plain programs
# and of convolutions come from it; those of the other classes, of which few or no runs are measured, are
# estimates. A program of several classes gets the largest.
MARGINS = {
    "plain": 0.01,
    "convolutions": 0.03,  # which algorithm cuDNN takes, and with it the workspace, is estimated
    "several streams": 0.02,  # when a block that two streams use is free again depends on the GPU's progress
    "data-dependent shapes": 0.03,  # beside the interval, which holds for other values
    "GPU or torch never measured": 0.03,  # no residuals: kernels and the CUDA context are estimated
    "compiled": 0.05,  # Inductor times kernels in the first step, with memory of its own
}
# One segment more or less, for requests of 1 to 10 MiB, is decided by the order of a few frees.
_SEGMENT = 20 * MiB
_MOST_FOR_SEGMENT = 0.03
_MEASURED_CAPABILITIES = {(9, 0)}
_MEASURED_TORCH = {"2.11", "2.13"}  # measured with 2.11, predicted with both


def margin(
    reserved: int,
    allocations: Sequence[Allocation],
    sizes_assumed: bool,
    compiled: bool,
    card: GPU,
    torch_version: str,
) -> int:
    """Bytes by which the predicted `reserved` may be off, either way."""
    share = max(MARGINS[name] for name in classes(allocations, sizes_assumed, compiled, card, torch_version))
    return min(max(int(share * reserved), _SEGMENT), int(max(share, _MOST_FOR_SEGMENT) * reserved))


def classes(
    allocations: Sequence[Allocation], sizes_assumed: bool, compiled: bool, card: GPU, torch_version: str
) -> Iterator[str]:
    """The classes of programs that the traced one belongs to. `sizes_assumed`: a size depends on values."""
    yield "plain"
    if any(map(is_convolution_workspace, allocations)):
        yield "convolutions"
    if any(one.stream for one in allocations):
        yield "several streams"
    if sizes_assumed:
        yield "data-dependent shapes"
    if compiled:
        yield "compiled"
    version = ".".join(torch_version.split(".")[:2])
    if card.capability not in _MEASURED_CAPABILITIES or version not in _MEASURED_TORCH:
        yield "GPU or torch never measured"
