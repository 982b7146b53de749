"""Expandable segments and max_split_size in the simulated allocator, against PyTorch's rules."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from oomph.errors import UserError
from oomph.prediction.allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemory,
    allocator_settings,
)
from oomph.prediction.expandable_segments import ExpandableAllocator

MIB = 1024 * 1024


def test_a_small_request_maps_one_page_of_2_mib_and_a_large_one_pages_of_20_mib() -> None:
    allocator = ExpandableAllocator()
    allocator.malloc(1)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(1 * MIB + 1)
    assert allocator.reserved == 22 * MIB
    allocator.malloc(50 * MIB)  # 19 MiB are left of the page; two more are mapped
    assert allocator.reserved == 62 * MIB


def test_the_free_end_is_extended_by_what_is_missing_only() -> None:
    allocator = ExpandableAllocator()
    kept, freed = allocator.malloc(30 * MIB), allocator.malloc(10 * MIB)
    allocator.free(freed)
    grown = allocator.malloc(25 * MIB)  # 10 MiB are there
    assert allocator.reserved == 60 * MIB
    assert grown.address == kept.address + kept.size


def test_a_block_is_split_down_to_512_bytes_in_the_large_pool_too() -> None:
    allocator = ExpandableAllocator()
    assert allocator.malloc(20 * MIB - 512).size == 20 * MIB - 512
    assert [len(segment.blocks) for segment in allocator.segments()] == [2]


def test_the_end_which_can_grow_is_used_last() -> None:
    """A hole of 30 MiB is taken rather than the free 20 MiB at the end, though it fits worse."""
    allocator = ExpandableAllocator()
    hole = allocator.malloc(30 * MIB)
    allocator.malloc(30 * MIB)
    end = allocator.malloc(20 * MIB)
    where = hole.address
    allocator.free(hole)
    allocator.free(end)
    assert allocator.malloc(5 * MIB).address == where


def test_growing_sequences_tile_one_arena_where_segments_pile_up() -> None:
    plain, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (plain, expandable):
        for length in range(100, 140, 4):
            first, second = allocator.malloc(length * MIB // 2), allocator.malloc(length * MIB)
            allocator.free(first)
            allocator.free(second)
    assert expandable.peak_reserved == 220 * MIB
    assert plain.peak_reserved > 4 * expandable.peak_reserved


def test_emptying_the_cache_unmaps_whole_pages_only_and_they_are_mapped_again_first() -> None:
    acts: list[tuple[str, int, int]] = []
    allocator = ExpandableAllocator(on_segment=lambda *act: acts.append(act))
    first, middle, last = (allocator.malloc(size * MIB) for size in (5, 60, 5))
    base = first.address
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB  # pages 0 and 3 hold something
    assert acts[-1] == ("segment_unmap", base + 20 * MIB, 40 * MIB)
    assert [segment.size for segment in allocator.segments()] == [20 * MIB, 20 * MIB]
    again = allocator.malloc(30 * MIB)
    assert again.address == base + 5 * MIB
    assert acts[-1] == ("segment_map", base + 20 * MIB, 20 * MIB)
    allocator.free(again)
    allocator.free(first)
    allocator.free(last)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])


def test_at_the_limit_free_pages_are_unmapped_and_the_request_is_tried_again() -> None:
    allocator = ExpandableAllocator(limit=100 * MIB)
    kept, freed = allocator.malloc(19 * MIB), allocator.malloc(61 * MIB)
    blocker = allocator.malloc(1 * MIB + 512)
    allocator.free(freed)
    with pytest.raises(OutOfMemory):  # the first and the last page are in use
        allocator.malloc(80 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.free(blocker)
    allocator.free(kept)
    assert allocator.malloc(100 * MIB).size == 100 * MIB
    assert allocator.reserved == 100 * MIB


def plain_expandable(requests: list[int]) -> list[tuple[int, int]]:
    """The rules once more, on a bare list of pages and a bare list of blocks, without any index."""
    page, results = 20 * MIB, []
    mapped = 0  # nothing is unmapped, so the mapped part is one stretch
    blocks: dict[int, tuple[int, int]] = {}
    order: list[int] = []
    for number, request in enumerate(requests):
        if request < 0:
            del blocks[order[-1 - request]]
            order[-1 - request] = -1
            results.append((-1, mapped))
            continue
        edges, at = [], 0
        for start, size in sorted(blocks.values()):
            if start > at:
                edges.append((start - at, at))
            at = start + size
        if mapped > at:
            edges.append((mapped - at, at))
        fitting = sorted(edge for edge in edges if edge[0] >= request)
        inner = [edge for edge in fitting if edge[1] + edge[0] < mapped]
        # The end counts as endless: the smallest that fits is passed over for a larger one inside.
        best = fitting[0] if fitting else None
        if best is not None and best not in inner and inner:
            best = min(edge for edge in inner if edge > best) if any(e > best for e in inner) else best
        if best is None:
            start = edges[-1][1] if edges and edges[-1][1] + edges[-1][0] == mapped else mapped
            mapped = max(mapped, -(-(start + request) // page) * page)
            best = (request, start)
        blocks[number] = (best[1], request)
        order.append(number)
        results.append((best[1], mapped))
    return results


@pytest.mark.parametrize("seed", range(6))
def test_every_request_gets_the_block_that_a_plain_search_by_the_rules_finds(seed: int) -> None:
    chance = random.Random(seed)
    requests, alive, count = [], [], 0
    for _ in range(400):
        if alive and chance.random() < 0.47:
            requests.append(-1 - alive.pop(chance.randrange(len(alive))))
        else:
            requests.append(chance.randrange(2049, 120_000) * 512)
            alive.append(count)
            count += 1
    allocator, served, got = ExpandableAllocator(), [], []
    base = None
    for request in requests:
        if request < 0:
            allocator.free(served[-1 - request])
            got.append((-1, allocator.reserved))
        else:
            block = allocator.malloc(request)
            base = block.address if base is None else base
            served.append(block)
            got.append((block.address - base, allocator.reserved))
    assert got == plain_expandable(requests)


@pytest.mark.parametrize("limit", [None, 900 * MIB])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_tile_the_mapped_stretches_and_no_two_free_blocks_are_neighbours(
    seed: int, limit: int | None
) -> None:
    chance, alive = random.Random(seed), []
    allocator = ExpandableAllocator(limit, max_split=chance.choice([None, 64 * MIB]))
    for step in range(600):
        if alive and chance.random() < 0.5:
            allocator.free(alive.pop(chance.randrange(len(alive))))
        else:
            size = chance.choice([chance.randrange(1, MIB), chance.randrange(MIB, 90 * MIB)])
            try:
                alive.append(allocator.malloc(size))
            except OutOfMemory:
                continue
        if step % 97 == 0:
            allocator.empty_cache()
        segments = allocator.segments()
        assert sum(segment.size for segment in segments) == allocator.reserved
        for segment in segments:
            at = segment.address
            for block in segment.blocks:
                assert block.address == at
                at += block.size
            assert not any(not a.allocated and not b.allocated for a, b in pairwise(segment.blocks))
        assert sum(b.size for s in segments for b in s.blocks if b.allocated) == allocator.allocated


def filled(max_split: int | None, *sizes: int) -> tuple[CachingAllocator, list[Block]]:
    allocator = CachingAllocator(max_split=max_split)
    return allocator, [allocator.malloc(size) for size in sizes]


def test_a_block_of_max_split_or_more_is_not_used_for_smaller_requests() -> None:
    allocator, (big,) = filled(128 * MIB, 200 * MIB)
    allocator.free(big)
    allocator.malloc(100 * MIB)
    assert allocator.reserved == 300 * MIB


def test_a_large_request_takes_a_free_block_less_than_20_mib_larger_whole() -> None:
    allocator, (big,) = filled(128 * MIB, 200 * MIB)
    allocator.free(big)
    taken = allocator.malloc(180 * MIB + 512)
    assert (taken.size, allocator.allocated, allocator.reserved) == (200 * MIB, 200 * MIB, 200 * MIB)
    allocator.free(taken)
    allocator.malloc(180 * MIB)  # exactly 20 MiB larger is too much
    assert allocator.reserved == 380 * MIB


def test_blocks_below_max_split_are_split_as_ever() -> None:
    allocator, (one,) = filled(128 * MIB, 100 * MIB)
    allocator.free(one)
    allocator.malloc(60 * MIB)
    allocator.malloc(40 * MIB)
    assert allocator.reserved == 100 * MIB


def test_at_the_limit_an_oversize_block_that_is_large_enough_goes_first_and_the_rest_stays_cached() -> None:
    freed: list[int] = []
    allocator = CachingAllocator(
        400 * MIB,
        max_split=64 * MIB,
        on_segment=lambda act, _, size: freed.append(size) if act == "segment_free" else None,
    )
    blocks = [allocator.malloc(size * MIB) for size in (30, 150, 180)]
    for block in blocks:
        allocator.free(block)
    allocator.malloc(120 * MIB)  # 150 is more than 20 MiB larger
    assert (freed, allocator.reserved) == ([150 * MIB], 330 * MIB)


def test_at_the_limit_the_largest_oversize_blocks_go_until_there_is_enough() -> None:
    freed: list[int] = []
    allocator = CachingAllocator(
        400 * MIB,
        max_split=64 * MIB,
        on_segment=lambda act, _, size: freed.append(size) if act == "segment_free" else None,
    )
    for block in [allocator.malloc(size * MIB) for size in (30, 70, 100, 180)]:
        allocator.free(block)
    allocator.malloc(270 * MIB)
    assert (freed, allocator.reserved) == ([180 * MIB, 100 * MIB], 370 * MIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, AllocatorSettings()),
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(True)),
        (" max_split_size_mb : 128 , expandable_segments:False", AllocatorSettings(False, 128 * MIB)),
        ("backend:native,garbage_collection_threshold:0.8", AllocatorSettings()),
    ],
)
def test_settings_are_read_as_torch_reads_them(text: str | None, expected: AllocatorSettings) -> None:
    assert allocator_settings(text) == expected
    assert allocator_settings(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments:yes", "expandable_segments is 'yes'; valid: True, False"),
        ("max_split_size_mb:20", "max_split_size_mb is '20'; valid: a whole number above 20"),
        ("backend:cudaMallocAsync", "'backend' cannot be predicted; valid: expandable_segments, max_split"),
        ("roundup_power2_divisions:[256:1,512:2]", "'roundup_power2_divisions' cannot be predicted"),
    ],
)
def test_settings_that_torch_refuses_or_we_do_not_know_are_told(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        allocator_settings(text)
