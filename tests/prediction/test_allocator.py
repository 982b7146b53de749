"""The simulated caching allocator against PyTorch's rules, in exact bytes, and expandable segments."""

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from oomph.errors import UserError
from oomph.prediction.allocator import (
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemory,
    allocator_settings,
)
from oomph.records import AllocatorSettings

KIB = 1024
MIB = 1024 * KIB


@pytest.mark.parametrize(("nbytes", "size"), [(511, 512), (512, 512), (513, 1024), (1_000_000, 1_000_448)])
def test_a_request_is_rounded_up_to_a_multiple_of_512_bytes(nbytes, size):
    assert CachingAllocator().malloc(nbytes).size == size


def test_a_free_11_mib_block_serves_10_5_mib_unsplit_and_counts_whole():
    allocator = CachingAllocator()
    allocator.malloc(9 * MIB)  # leaves 11 MiB of a 20 MiB segment
    block = allocator.malloc(10 * MIB + MIB // 2)
    assert block.size == 11 * MIB
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)
    allocator.free(block)
    assert allocator.allocated == 9 * MIB


def test_a_segment_in_partial_use_is_not_released_so_the_request_is_refused():
    allocator = CachingAllocator(limit=40 * MIB)
    kept, gone = allocator.malloc(2 * MIB), allocator.malloc(8 * MIB)
    allocator.free(gone)
    with pytest.raises(OutOfMemory, match=str(22 * MIB)):
        allocator.malloc(22 * MIB)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 20 * MIB)
    allocator.free(kept)
    assert allocator.malloc(22 * MIB).size == 22 * MIB


def test_large_segments_are_released_before_small_ones_and_smaller_before_larger():
    acts = []
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


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_every_stream_has_its_own_blocks_and_emptying_the_cache_releases_all(kind):
    allocator = kind()
    first = allocator.malloc(40 * MIB)
    allocator.free(first)
    second = allocator.malloc(40 * MIB, stream=1)
    assert (second.address != first.address, allocator.reserved) == (True, 80 * MIB)
    assert allocator.malloc(40 * MIB).address == first.address  # the first stream's own
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_a_block_that_two_streams_use_is_reused_after_a_synchronization(kind):
    allocator = kind(limit=120 * MIB)
    for reserved in (40 * MIB, 80 * MIB, 120 * MIB):
        block = allocator.malloc(40 * MIB)
        block.recorded = True
        allocator.free(block)
        assert (allocator.allocated, allocator.reserved) == (0, reserved)
    allocator.synchronize()
    allocator.free(allocator.malloc(40 * MIB))
    assert allocator.reserved == 120 * MIB
    block = allocator.malloc(40 * MIB)
    block.recorded = True
    allocator.free(block)
    assert allocator.malloc(120 * MIB).size == 120 * MIB  # at the limit, torch synchronizes by itself


def test_peaks_start_again_from_the_current_values():
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(10 * MIB), allocator.malloc(30 * MIB)
    allocator.free(gone)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (40 * MIB, 40 * MIB)
    allocator.reset_peak()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (10 * MIB, 40 * MIB)
    allocator.free(kept)
    assert allocator.peak_allocated == 10 * MIB


class MappedPages:
    """Follows what the allocator has reserved, in pages of 2 MiB."""

    def __init__(self):
        self.pages = set()

    def __call__(self, action, address, size):
        pages = set(range(address // (2 * MIB), (address + size) // (2 * MIB)))
        if action in ("segment_alloc", "segment_map"):
            assert not pages & self.pages
            self.pages |= pages
        else:
            assert pages <= self.pages
            self.pages -= pages

    def check(self, allocator, alive):
        """Blocks in use do not overlap, and lie in reserved memory."""
        assert len(self.pages) * 2 * MIB == allocator.reserved
        assert allocator.allocated == sum(block.size for block in alive)
        ordered = sorted(alive, key=lambda block: block.address)
        assert all(left.address + left.size <= right.address for left, right in pairwise(ordered))
        for block in alive:
            last = block.address + block.size - 1
            assert self.pages.issuperset(range(block.address // (2 * MIB), last // (2 * MIB) + 1))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("kind", "limit"),
    [(CachingAllocator, 800 * MIB), (ExpandableAllocator, None), (ExpandableAllocator, 900 * MIB)],
)
def test_blocks_do_not_overlap_and_when_all_are_free_everything_is_released(kind, limit, seed):
    rng, pages, alive = random.Random(seed), MappedPages(), []
    allocator = kind(limit, max_split=rng.choice([None, 64 * MIB]), on_segment=pages)
    for step in range(2000):
        if alive and rng.random() < 0.5:
            allocator.free(alive.pop(rng.randrange(len(alive))))
        else:
            nbytes = rng.randrange(1, rng.choice([2000, 1 << 20, 9 << 20, 90 << 20]))
            try:
                alive.append(allocator.malloc(nbytes))
            except OutOfMemory:
                continue
        if step % 97 == 0:
            allocator.empty_cache()
        assert limit is None or allocator.reserved <= limit
        if step % 10 == 0:
            pages.check(allocator, alive)
    for block in alive:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated) == (0, 0)


RECORDINGS = sorted((Path(__file__).parent / "data").glob("allocator_h200_*.json.gz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split("_")[2].split(".")[0])
def test_the_same_requests_take_the_same_segments_as_on_the_gpu(path):
    """`requests` holds sizes; -1-n frees the n-th request."""
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    segments = []
    allocator = CachingAllocator(on_segment=lambda action, address, size: segments.append(size))
    served = []
    for request in recorded["requests"]:
        if request >= 0:
            served.append(allocator.malloc(request))
        else:
            allocator.free(served[-1 - request])
    assert segments == recorded["segments"]
    assert allocator.peak_reserved == recorded["reserved"]


def test_a_small_request_maps_one_page_of_2_mib_and_a_large_one_pages_of_20_mib():
    allocator = ExpandableAllocator()
    allocator.malloc(1)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(1 * MIB + 1)
    assert allocator.reserved == 22 * MIB
    allocator.malloc(50 * MIB)  # 19 MiB are left of the page; two more are mapped
    assert allocator.reserved == 62 * MIB


def test_growing_sequences_tile_one_arena_where_segments_pile_up():
    plain, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (plain, expandable):
        for length in range(100, 140, 4):
            first, second = allocator.malloc(length * MIB // 2), allocator.malloc(length * MIB)
            allocator.free(first)
            allocator.free(second)
    assert expandable.peak_reserved == 220 * MIB
    assert plain.peak_reserved > 4 * expandable.peak_reserved


def test_a_limit_counts_the_whole_request_where_a_part_of_it_is_mapped():
    allocator = ExpandableAllocator(100 * MIB)
    allocator.malloc(40 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(60 * MIB)  # of which 40 MiB are mapped: with them, 80 + 60 are too many
    assert allocator.released == 2  # pages of 20 MiB
    with pytest.raises(OutOfMemory):
        allocator.malloc(1 * MIB + 1)


def test_emptying_the_cache_unmaps_whole_pages_only_and_they_are_mapped_again_first():
    acts = []
    allocator = ExpandableAllocator(on_segment=lambda *act: acts.append(act))
    first, middle, last = (allocator.malloc(size * MIB) for size in (5, 60, 5))
    base = first.address
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB  # pages 0 and 3 hold something
    assert acts[-1] == ("segment_unmap", base + 20 * MIB, 40 * MIB)
    again = allocator.malloc(30 * MIB)
    assert again.address == base + 5 * MIB
    assert acts[-1] == ("segment_map", base + 20 * MIB, 20 * MIB)
    allocator.free(again)
    allocator.free(first)
    allocator.free(last)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_at_the_limit_free_pages_are_unmapped_and_the_request_is_tried_again():
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


def test_a_free_block_inside_is_taken_before_a_smaller_one_at_the_end():
    allocator = ExpandableAllocator()
    first, _, _ = (allocator.malloc(size * MIB) for size in (60, 20, 30))  # and 10 MiB of the last page
    allocator.free(first)
    assert allocator.malloc(8 * MIB).address == first.address
    assert allocator.reserved == 120 * MIB


def filled(max_split, *sizes):
    allocator = CachingAllocator(max_split=max_split)
    return allocator, [allocator.malloc(size) for size in sizes]


def test_a_block_of_max_split_or_more_is_not_used_for_smaller_requests():
    allocator, (big,) = filled(128 * MIB, 200 * MIB)
    allocator.free(big)
    allocator.malloc(100 * MIB)
    assert allocator.reserved == 300 * MIB


def test_a_large_request_takes_a_free_block_less_than_20_mib_larger_whole():
    allocator, (big,) = filled(128 * MIB, 200 * MIB)
    allocator.free(big)
    taken = allocator.malloc(180 * MIB + 512)
    assert (taken.size, allocator.allocated, allocator.reserved) == (200 * MIB, 200 * MIB, 200 * MIB)
    allocator.free(taken)
    allocator.malloc(180 * MIB)  # exactly 20 MiB larger is too much
    assert allocator.reserved == 380 * MIB


@pytest.mark.parametrize(
    ("cached", "requested", "released", "reserved"),
    [
        ((30, 150, 180), 120, [150], 330),  # one that is large enough; 150 is more than 20 MiB larger
        ((30, 70, 100, 180), 270, [180, 100], 370),  # otherwise the largest, until there is enough
    ],
)
def test_at_the_limit_oversize_blocks_go_first_and_the_rest_stays_cached(
    cached, requested, released, reserved
):
    freed = []
    allocator = CachingAllocator(
        400 * MIB,
        max_split=64 * MIB,
        on_segment=lambda act, _, size: freed.append(size // MIB) if act == "segment_free" else None,
    )
    for block in [allocator.malloc(size * MIB) for size in cached]:
        allocator.free(block)
    allocator.malloc(requested * MIB)
    assert (freed, allocator.reserved) == (released, reserved * MIB)


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
def test_settings_are_read_as_torch_reads_them(text, expected):
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
def test_settings_that_torch_refuses_or_that_are_not_modelled_are_errors(text, message):
    with pytest.raises(UserError, match=message):
        allocator_settings(text)
