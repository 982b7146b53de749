"""Runs recorded on an H200 with torch's own memory history, served again by the simulated allocator."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from oomph.prediction.allocator import Block, CachingAllocator

RECORDINGS = sorted((Path(__file__).parent / "data").glob("allocator_h200_*.json.gz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split("_")[2].split(".")[0])
def test_the_same_requests_take_the_same_segments_as_on_the_gpu(path: Path) -> None:
    """`requests` holds sizes; -1-n frees the n-th request."""
    recorded = json.loads(gzip.decompress(path.read_bytes()))
    segments: list[int] = []
    allocator = CachingAllocator(on_segment=lambda action, address, size: segments.append(size))
    served: list[Block] = []
    for request in recorded["requests"]:
        if request >= 0:
            served.append(allocator.malloc(request))
        else:
            allocator.free(served[-1 - request])
    assert segments == recorded["segments"]
    assert allocator.peak_reserved == recorded["reserved"]


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) == 3
