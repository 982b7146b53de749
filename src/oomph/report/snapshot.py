"""A predicted run as a snapshot file that PyTorch's memory visualizer opens.

The format is that of `torch.cuda.memory._dump_snapshot`; pytorch.org/memory_viz and
`python -m torch.cuda._memory_viz` both read it. The viewer in the browser has its own unpickler, which
reads only plain dicts, lists, tuples, strings and numbers, so nothing else may go into the file.
"""

from __future__ import annotations

import os
import pickle
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

from oomph.records import Allocation, Prediction
from oomph.units import MiB

# (action, address, bytes, id of the Allocation), in program order; the actions are "alloc", "free" and
# those on segments, with the names that PyTorch gives them.
Trace = Sequence[tuple[str, int, int, int]]

_Block = tuple[int, int, int]  # address, bytes, id of the Allocation that caused it
_Frames = dict[int, list[dict[str, Any]]]  # by id of the Allocation

_PROTOCOL = 4  # the newest that every version of the viewer reads
_SMALL_REQUEST = MiB  # the largest that the small pool serves
_PAGE = 2 * MiB  # memory is mapped into expandable segments in multiples of it
_DEFAULT_POOL = (0, 0)


def write_snapshot(path: str | os.PathLike[str], prediction: Prediction, trace: Trace) -> None:
    """Write `trace`, the actions of the allocator for the prediction's events, as a memory snapshot.

    The segments in the file are those left at the end of the trace, as in a snapshot of a real run.
    """
    with open(path, "wb") as file:
        pickle.dump(snapshot(prediction, trace), file, protocol=_PROTOCOL)


def snapshot(prediction: Prediction, trace: Trace) -> dict[str, Any]:
    """The content of the file. The trace has the requested sizes; blocks have the rounded ones as well."""
    allocations, settings = prediction.allocations, prediction.allocator
    frames: _Frames = {}
    for _, _, _, id in trace:
        if id not in frames:
            frames[id] = _frames(allocations[id])
    return {
        "segments": _segments(allocations, trace, frames, settings.expandable_segments),
        "device_traces": [list(_entries(allocations, trace, frames))],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": str(settings),
            "max_split_size": -1 if settings.max_split is None else settings.max_split,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": settings.expandable_segments,
            "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }


def _frames(allocation: Allocation) -> list[dict[str, Any]]:
    """Innermost first, as in a stack trace: the operator, the user's line, the module around it."""
    frames = [_frame("op", 0, allocation.op)]
    if allocation.site is not None:
        frames.append(_frame(allocation.site.file, allocation.site.line, allocation.site.function))
    if allocation.module:
        frames.append(_frame("module", 0, allocation.module))
    return frames


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _entries(allocations: Sequence[Allocation], trace: Trace, frames: _Frames) -> Iterator[dict[str, Any]]:
    descriptions = {id: _description(allocations[id]) for id in frames}
    time = 0
    for action, address, size, id in trace:
        for name in ("free_requested", "free_completed") if action == "free" else (action,):
            time += 1
            entry = {
                "action": name,
                "addr": address,
                "size": size,
                "stream": allocations[id].stream,
                "time_us": time,
                "pool_id": _DEFAULT_POOL,
                "frames": frames[id],
            }
            if action in ("alloc", "free"):
                entry["size"] = allocations[id].bytes
                entry["category"] = allocations[id].kind
                entry["user_metadata"] = descriptions[id]
            else:
                # The viewer colours by category, and fails if there are categories but none called "unknown".
                entry["category"] = "unknown"
            yield entry


def _description(allocation: Allocation) -> str:
    shape = ", ".join(map(str, allocation.shape))
    return f"[{shape}] {allocation.dtype}, {allocation.stage}, step {allocation.step}"


def _segments(
    allocations: Sequence[Allocation], trace: Trace, frames: _Frames, expandable: bool
) -> list[dict[str, Any]]:
    reserved, in_use = _alive_at_the_end(trace)
    segments: list[_Block] = []
    for start, size, id in sorted(reserved.values()):
        if expandable and segments and start == segments[-1][0] + segments[-1][1]:
            first, before, id = segments.pop()  # torch reports a stretch of mapped pages as one segment
            start, size = first, before + size
        segments.append((start, size, id))
    starts = [start for start, _, _ in segments]
    owners: list[list[_Block]] = [[] for _ in segments]
    for block in sorted(in_use.values()):
        owners[bisect_right(starts, block[0]) - 1].append(block)
    return [
        {**_segment(segment, blocks, allocations, frames), "is_expandable": expandable}
        for segment, blocks in zip(segments, owners, strict=True)
    ]


def _alive_at_the_end(trace: Trace) -> tuple[dict[int, _Block], dict[int, _Block]]:
    """Segments (of expandable ones, each page) and blocks that the trace does not return, by address."""
    reserved: dict[int, _Block] = {}
    in_use: dict[int, _Block] = {}
    for action, address, size, id in trace:
        pages = range(address, address + size, _PAGE)
        if action == "segment_alloc":
            reserved[address] = (address, size, id)
        elif action == "segment_free":
            del reserved[address]
        elif action == "segment_map":
            reserved.update((page, (page, _PAGE, id)) for page in pages)
        elif action == "segment_unmap":
            for page in pages:
                del reserved[page]
        elif action == "alloc":
            in_use[address] = (address, size, id)
        elif action == "free":
            del in_use[address]
    return reserved, in_use


def _segment(
    segment: _Block, in_use: Sequence[_Block], allocations: Sequence[Allocation], frames: _Frames
) -> dict[str, Any]:
    start, total, id = segment
    blocks = []
    free_from = start
    for address, size, owner in in_use:
        if address > free_from:  # free neighbours are always joined, so a gap is exactly one block
            blocks.append(_block(free_from, address - free_from, 0, "inactive", []))
        blocks.append(_block(address, size, allocations[owner].bytes, "active_allocated", frames[owner]))
        free_from = address + size
    if free_from < start + total:
        blocks.append(_block(free_from, start + total - free_from, 0, "inactive", []))

    allocated = sum(size for _, size, _ in in_use)
    return {
        "device": 0,
        "address": start,
        "total_size": total,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(allocations[owner].bytes for _, _, owner in in_use),
        "stream": allocations[id].stream,
        "segment_type": "small" if allocations[id].bytes <= _SMALL_REQUEST else "large",
        "segment_pool_id": _DEFAULT_POOL,
        "frames": frames[id],
        "blocks": blocks,
    }


def _block(
    address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
