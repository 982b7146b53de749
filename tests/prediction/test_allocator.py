"""The simulated allocator against PyTorch's rules, in exact bytes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from oomph.prediction.allocator import Block, CachingAllocator, OutOfMemory, Segment

KIB = 1024
MIB = 1024 * KIB


def blocks_of(segment: Segment) -> list[tuple[int, bool]]:
    return [(block.size, block.allocated) for block in segment.blocks]


def test_one_byte_takes_512_bytes_of_a_2_mib_segment() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(1)
    assert (block.size, block.requested) == (512, 1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)


@pytest.mark.parametrize(("nbytes", "size"), [(511, 512), (512, 512), (513, 1024), (1_000_000, 1_000_448)])
def test_a_request_is_rounded_up_to_a_multiple_of_512_bytes(nbytes: int, size: int) -> None:
    assert CachingAllocator().malloc(nbytes).size == size


def test_a_request_for_nothing_takes_nothing_and_may_be_freed() -> None:
    allocator = CachingAllocator(limit=0)
    block = allocator.malloc(0)
    assert (block.size, allocator.allocated, allocator.reserved) == (0, 0, 0)
    allocator.free(block)
    assert allocator.segments() == []


def test_a_negative_request_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot allocate -1 bytes"):
        CachingAllocator().malloc(-1)


def test_three_tensors_of_600_kb_fit_one_small_segment_and_a_fourth_opens_another() -> None:
    allocator = CachingAllocator()
    for _ in range(3):
        assert allocator.malloc(600_000).size == 600_064
    assert (allocator.allocated, allocator.reserved) == (1_800_192, 2 * MIB)
    allocator.malloc(600_000)
    assert (allocator.allocated, allocator.reserved) == (2_400_256, 4 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "reserved"),
    [
        (1 * MIB, 2 * MIB),
        (1 * MIB + 1, 20 * MIB),
        (5 * MIB, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded to 10 MiB before the segment is chosen
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (20 * MIB, 20 * MIB),
        (1000 * MIB + 1, 1002 * MIB),
    ],
)
def test_the_size_of_a_new_segment_follows_from_the_request(nbytes: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(nbytes)
    assert allocator.reserved == reserved


def test_a_remainder_of_exactly_1_mib_stays_with_a_large_block() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(11 * MIB)
    assert (block.size, allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB, 12 * MIB)


def test_a_remainder_above_1_mib_is_split_off_a_large_block() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(11 * MIB - 512)
    assert (block.size, allocator.allocated) == (11 * MIB - 512, 11 * MIB - 512)
    (segment,) = allocator.segments()
    assert blocks_of(segment) == [(11 * MIB - 512, True), (1 * MIB + 512, False)]


def test_a_small_block_is_split_down_to_the_last_512_bytes() -> None:
    allocator = CachingAllocator()
    for nbytes in (1 * MIB, 1 * MIB - 512):
        allocator.malloc(nbytes)
    (segment,) = allocator.segments()
    assert blocks_of(segment) == [(1 * MIB, True), (1 * MIB - 512, True), (512, False)]


def test_a_free_11_mib_block_serves_10_5_mib_unsplit_and_counts_whole() -> None:
    allocator = CachingAllocator()
    allocator.malloc(9 * MIB)  # leaves 11 MiB of a 20 MiB segment
    block = allocator.malloc(10 * MIB + MIB // 2)
    assert (block.size, block.requested) == (11 * MIB, 10 * MIB + MIB // 2)
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)
    allocator.free(block)
    assert allocator.allocated == 9 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough() -> None:
    allocator = CachingAllocator()
    held = [allocator.malloc(size * MIB) for size in (40, 30, 50)]
    smallest = held[1].address
    for block in held:
        allocator.free(block)
    assert allocator.malloc(30 * MIB).address == smallest
    assert allocator.reserved == 120 * MIB


def test_of_equal_blocks_the_one_at_the_lowest_address_which_is_the_newest_is_taken() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
    assert second.address < first.address
    allocator.free(second)
    allocator.free(first)
    assert allocator.malloc(30 * MIB) is second


def test_small_requests_never_use_the_large_pool_and_the_reverse() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(1 * MIB)
    assert allocator.reserved == 102 * MIB
    allocator.malloc(1 * MIB + 1)
    assert allocator.reserved == 102 * MIB


def test_a_freed_block_joins_the_free_blocks_on_both_sides() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(6 * MIB) for _ in range(3)]
    (segment,) = allocator.segments()
    assert blocks_of(segment) == [(6 * MIB, True)] * 3 + [(2 * MIB, False)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    (segment,) = allocator.segments()
    assert blocks_of(segment) == [(6 * MIB, False), (6 * MIB, True), (8 * MIB, False)]
    allocator.free(blocks[1])
    (segment,) = allocator.segments()
    assert blocks_of(segment) == [(20 * MIB, False)]
    assert allocator.malloc(19 * MIB + 1).address == segment.address


def test_blocks_of_different_segments_are_never_joined() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(10 * MIB) for _ in range(2)]
    assert blocks[0].address == blocks[1].address + 10 * MIB
    for block in blocks:
        allocator.free(block)
    allocator.malloc(20 * MIB)
    assert allocator.reserved == 40 * MIB


def test_freed_memory_stays_reserved_until_the_cache_is_emptied() -> None:
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(6 * MIB), allocator.malloc(30 * MIB)
    allocator.free(gone)
    assert (allocator.allocated, allocator.reserved) == (6 * MIB, 50 * MIB)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (6 * MIB, 20 * MIB)
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.segments()) == (0, [])


def test_at_the_limit_unused_segments_are_released_and_the_request_is_tried_again() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    first = allocator.malloc(60 * MIB)
    allocator.free(first)
    block = allocator.malloc(70 * MIB)
    assert (block.size, allocator.reserved, allocator.peak_reserved) == (70 * MIB, 70 * MIB, 70 * MIB)


def test_a_request_may_fill_the_limit_to_the_byte() -> None:
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.malloc(98 * MIB)
    allocator.malloc(512)
    assert allocator.reserved == 100 * MIB


def test_a_segment_in_partial_use_is_not_released_so_the_request_is_refused() -> None:
    allocator = CachingAllocator(limit=40 * MIB)
    kept, gone = allocator.malloc(2 * MIB), allocator.malloc(8 * MIB)
    allocator.free(gone)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(22 * MIB)
    assert (caught.value.requested, caught.value.segment) == (22 * MIB, 22 * MIB)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 20 * MIB)
    allocator.free(kept)
    assert allocator.malloc(22 * MIB).size == 22 * MIB


def test_nothing_is_released_while_a_cached_block_serves_the_request() -> None:
    acts: list[str] = []
    allocator = CachingAllocator(limit=60 * MIB, on_segment=lambda action, address, size: acts.append(action))
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(30 * MIB)
    assert acts == ["segment_alloc"]
    assert allocator.reserved == 60 * MIB


def test_large_segments_are_released_before_small_ones_and_smaller_before_larger() -> None:
    acts: list[tuple[str, int]] = []
    allocator = CachingAllocator(
        limit=100 * MIB, on_segment=lambda action, address, size: acts.append((action, size))
    )
    for block in [allocator.malloc(size) for size in (512, 40 * MIB, 30 * MIB)]:
        allocator.free(block)
    acts.clear()
    allocator.malloc(90 * MIB)
    assert acts == [
        ("segment_free", 30 * MIB),
        ("segment_free", 40 * MIB),
        ("segment_free", 2 * MIB),
        ("segment_alloc", 90 * MIB),
    ]


def test_freeing_a_block_twice_is_an_error() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(512)
    allocator.free(block)
    with pytest.raises(ValueError, match="is not allocated"):
        allocator.free(block)


def test_peaks_start_again_from_the_current_values() -> None:
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(10 * MIB), allocator.malloc(30 * MIB)
    allocator.free(gone)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (40 * MIB, 40 * MIB)
    allocator.reset_peak()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (10 * MIB, 40 * MIB)
    allocator.free(kept)
    assert allocator.peak_allocated == 10 * MIB


def shuffled_run(seed: int, limit: int | None = None) -> tuple[list[tuple[int, int]], CachingAllocator]:
    """A few thousand requests and frees in random order, and the blocks that served them."""
    rng = random.Random(seed)
    allocator = CachingAllocator(limit)
    alive: list[Block] = []
    served = []
    for _ in range(4000):
        if alive and rng.random() < 0.5:
            allocator.free(alive.pop(rng.randrange(len(alive))))
        else:
            nbytes = rng.randrange(1, rng.choice([2000, 1 << 20, 9 << 20, 80 << 20]))
            try:
                alive.append(allocator.malloc(nbytes))
            except OutOfMemory:
                continue
            served.append((alive[-1].address, alive[-1].size))
        assert allocator.allocated == sum(block.size for block in alive)
    return served, allocator


@pytest.mark.parametrize("limit", [None, 600 * MIB])
def test_the_same_requests_are_served_by_the_same_blocks_every_time(limit: int | None) -> None:
    assert shuffled_run(7, limit)[0] == shuffled_run(7, limit)[0]


def plain_run(seed: int) -> list[tuple[int, int]]:
    """The requests of `shuffled_run` without a limit, by the rules alone: lists, searched from end to end."""
    rng = random.Random(seed)
    segments: list[list[list[int]]] = []  # blocks as [address, size, in use]
    alive: list[list[int]] = []
    served = []
    bottom = 0x7F00_0000_0000
    for _ in range(4000):
        if alive and rng.random() < 0.5:
            alive.pop(rng.randrange(len(alive)))[2] = 0
            for blocks in segments:
                for i in range(len(blocks) - 1, 0, -1):
                    if not blocks[i][2] and not blocks[i - 1][2]:
                        blocks[i - 1][1] += blocks.pop(i)[1]
            continue
        nbytes = rng.randrange(1, rng.choice([2000, 1 << 20, 9 << 20, 80 << 20]))
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        own = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else own
        fitting = [
            (block[1], block[0], blocks)
            for blocks in segments
            if (sum(b[1] for b in blocks) == 2 * MIB) == small
            for block in blocks
            if not block[2] and block[1] >= size
        ]
        if not fitting:
            bottom -= whole
            segments.append([[bottom, whole, 0]])
            fitting = [(whole, bottom, segments[-1])]
        _, address, blocks = min(fitting)
        at = next(i for i, block in enumerate(blocks) if block[0] == address)
        left = blocks[at][1] - size
        if left >= 512 if small else left > MIB:
            blocks[at][1] = size
            blocks.insert(at + 1, [address + size, left, 0])
        blocks[at][2] = 1
        alive.append(blocks[at])
        served.append((address, blocks[at][1]))
    return served


@pytest.mark.parametrize("seed", range(2))
def test_every_request_gets_the_block_that_a_plain_search_by_the_rules_finds(seed: int) -> None:
    assert shuffled_run(seed)[0] == plain_run(seed)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_tile_their_segments_and_no_two_free_blocks_are_neighbours(seed: int) -> None:
    _, allocator = shuffled_run(seed, limit=800 * MIB)
    segments = allocator.segments()
    assert sum(segment.size for segment in segments) == allocator.reserved <= 800 * MIB
    assert sum(b.size for s in segments for b in s.blocks if b.allocated) == allocator.allocated
    for segment in segments:
        expected = segment.address
        for block in segment.blocks:
            assert block.address == expected
            expected += block.size
        states = [block.allocated for block in segment.blocks]
        assert all(left or right for left, right in pairwise(states))
