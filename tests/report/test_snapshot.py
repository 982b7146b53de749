"""The memory snapshot: its structure, and that PyTorch's own tools read it."""

import pickle
import pickletools

import pytest
from sample_prediction import allocation, prediction
from torch.cuda import _memory_viz

from oomph.prediction.allocator import replay
from oomph.records import AllocatorSettings, Event, Site
from oomph.report.snapshot import snapshot, write_snapshot

pytestmark = pytest.mark.usefixtures("in_process")

MIB = 1024 * 1024

# What the unpickler inside PyTorch's MemoryViz.js understands.
VIEWER_OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}


def made(id, nbytes, kind, site, module):
    tensor = {"shape": (2, 3), "dtype": "bfloat16", "op": "aten.mm"}
    return allocation(id, nbytes, kind=kind, site=site, module=module, step=1, **tensor)


ALLOCATIONS = (
    made(0, 30 * MIB, "parameter", None, "model.head"),
    made(1, 600_000, "activation", Site("/home/me/train.py", 41, "forward"), "model.layers.0"),
    made(2, 5 * MIB, "activation", Site("/home/me/loss.py", 7, "loss"), ""),
    made(3, 6 * MIB, "temporary", Site("/home/me/loss.py", 8, "loss"), ""),
    made(4, 0, "temporary", None, ""),
    made(5, 60 * MIB, "activation", Site("/home/me/loss.py", 9, "loss"), ""),
)
EVENTS = tuple(
    [Event("alloc", 0), Event("mark", -1, "step 1")]
    + [Event("alloc", id) for id in (1, 2, 3, 4)]
    + [Event("free", id) for id in (2, 4)]
)


def content(events=EVENTS, limit=None, settings=None):
    settings = settings or AllocatorSettings()
    trace = replay(events, ALLOCATIONS, limit, settings=settings, record=True).trace
    return snapshot(prediction(events=events, allocations=ALLOCATIONS, allocator=settings), trace)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.pickle"
    write_snapshot(
        path,
        prediction(events=EVENTS, allocations=ALLOCATIONS),
        replay(EVENTS, ALLOCATIONS, record=True).trace,
    )
    return path


def test_the_file_has_what_torch_would_dump_and_the_viewer_in_the_browser_can_unpickle(file):
    loaded = pickle.loads(file.read_bytes())
    assert loaded == content()
    assert list(loaded) == ["segments", "device_traces", "allocator_settings", "external_annotations"]
    assert {opcode.name for opcode, _, _ in pickletools.genops(file.read_bytes())} <= VIEWER_OPCODES


def test_the_trace_has_every_act_of_the_allocator_in_order():
    (entries,) = content()["device_traces"]
    assert [(entry["action"], entry["size"]) for entry in entries] == [
        ("segment_alloc", 30 * MIB),
        ("alloc", 30 * MIB),
        ("segment_alloc", 2 * MIB),
        ("alloc", 600_000),
        ("segment_alloc", 20 * MIB),
        ("alloc", 5 * MIB),
        ("alloc", 6 * MIB),
        ("free_requested", 5 * MIB),
        ("free_completed", 5 * MIB),
    ]
    allocated, freed = entries[5], entries[7:]
    assert {entry["addr"] for entry in freed} == {allocated["addr"]}
    times = [entry["time_us"] for entry in entries]
    assert times == sorted(set(times))
    assert {entry["stream"] for entry in entries} == {0}


def test_the_segments_are_those_left_at_the_end_with_their_blocks_and_gaps():
    segments = content()["segments"]
    assert [(segment["total_size"], segment["segment_type"]) for segment in segments] == [
        (20 * MIB, "large"),
        (30 * MIB, "large"),
        (2 * MIB, "small"),
    ]
    blocks = [
        [(b["size"], b["requested_size"], b["state"]) for b in segment["blocks"]] for segment in segments
    ]
    assert blocks == [
        [(5 * MIB, 0, "inactive"), (6 * MIB, 6 * MIB, "active_allocated"), (9 * MIB, 0, "inactive")],
        [(30 * MIB, 30 * MIB, "active_allocated")],
        [(600_064, 600_000, "active_allocated"), (2 * MIB - 600_064, 0, "inactive")],
    ]
    assert [segment["allocated_size"] for segment in segments] == [6 * MIB, 30 * MIB, 600_064]
    for segment in segments:
        assert segment["blocks"][0]["address"] == segment["address"]
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]


def test_an_entry_has_operator_line_module_shape_dtype_stage_step_and_category():
    (entries,) = content()["device_traces"]
    entry = next(entry for entry in entries if entry["size"] == 600_000)
    assert [(frame["filename"], frame["line"], frame["name"]) for frame in entry["frames"]] == [
        ("op", 0, "aten.mm"),
        ("/home/me/train.py", 41, "forward"),
        ("module", 0, "model.layers.0"),
    ]
    assert entry["user_metadata"] == "[2, 3] bfloat16, forward activations, step 1"
    # The viewer needs a category "unknown" as soon as there are others.
    assert {entry["category"] for entry in entries} == {"unknown", "parameter", "activation", "temporary"}


def test_a_segment_that_was_released_is_in_the_trace_and_not_in_the_segments():
    events = (Event("alloc", 0), Event("free", 0), Event("alloc", 5))
    result = content(events, limit=70 * MIB)
    assert [entry["action"] for entry in result["device_traces"][0]][4] == "segment_free"
    assert [segment["total_size"] for segment in result["segments"]] == [60 * MIB]


def test_expandable_segments_are_stretches_of_mapped_pages():
    events = (*EVENTS[:1], *EVENTS[2:], Event("free", 0), Event("mark", -1, "empty_cache"))
    result = content(events, settings=AllocatorSettings(True))
    actions = [entry["action"] for entry in result["device_traces"][0] if "segment" in entry["action"]]
    assert actions == ["segment_map"] * 3 + ["segment_unmap"]
    segments = result["segments"]
    assert [(one["total_size"], one["segment_type"], one["is_expandable"]) for one in segments] == [
        (2 * MIB, "small", True),
        (40 * MIB, "large", True),  # of 20 and 20: the first page of 60 was unmapped
    ]
    assert sum(block["size"] for one in segments for block in one["blocks"]) == 42 * MIB


def test_a_run_without_events_is_an_empty_snapshot():
    result = content(())
    assert (result["segments"], result["device_traces"]) == ([], [[]])
    assert "segments: 0" in _memory_viz.segsum(result)


def test_torch_reads_and_draws_it():
    segments, trace = _memory_viz.segsum(content()), _memory_viz.trace(content())
    for text in ("segments: 3", "total_reserved: 52.0MiB", "total_allocated: 36.6MiB"):
        assert text in segments
    assert "9 entries" in trace
    assert (trace.count("cudaMalloc("), trace.count("free completed")) == (3, 1)
    lines = _memory_viz.memory(content(), format_flamegraph=str).splitlines()
    assert (
        "stream_0;active_allocated;module:0:model.layers.0;train.py:41:forward;op:0:aten.mm 600000" in lines
    )
    by_segment = _memory_viz.segments(content(), format_flamegraph=str)
    assert by_segment.count("active_allocated") == 4  # three blocks, and what rounding added to one of them
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "snapshot.pickle" in plot(content())
