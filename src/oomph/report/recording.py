"""A PyTorch memory snapshot (`torch.cuda.memory._dump_snapshot`) as a Prediction record, read without torch.

Nothing in the file is executed: the unpickler refuses every global, so it can make dicts, lists, tuples,
strings, numbers and bytes only. What does not look like a snapshot raises UserError with one line.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from oomph.errors import UserError
from oomph.records import (
    STAGES,
    Alive,
    Allocation,
    Event,
    Moment,
    Note,
    Peak,
    Prediction,
    Site,
    Stage,
    alive_after,
)
from oomph.report.terminal import printable
from oomph.units import counted, format_bytes

_MOST_BYTES = 2**60  # of a size or an address: more is not a snapshot
_MEMORY_PER_BYTE = 64  # of the file; dicts take a multiple of their pickled size
_OWN_METADATA = re.compile(r"\[([\d, ]*)\] (\w*), ([a-z ]+), step \d+")
_LIBRARIES = re.compile(
    r"[/\\](site|dist)-packages[/\\](torch|torchgen|triton|einops|functorch|oomph)[/\\]|[/\\]python3\.\d+[/\\](?!.*-packages)"
)


class _NotASnapshot(Exception):
    pass


def is_pickle(data: bytes) -> bool:
    return data[:1] == b"\x80"


def recording_of(found: Any, name: str) -> Prediction:
    """Of the object that a snapshot holds. `name`: where it comes from, for messages."""
    return _Recording(found).record(name)


def read_snapshot(data: bytes, name: str) -> Prediction:
    try:
        return recording_of(_unpickle(data), name)
    except (_NotASnapshot, pickle.UnpicklingError) as error:
        reason = printable(str(error), 150)
    except MemoryError:
        reason = "reading it takes more memory than such a file can need"
    except (EOFError, IndexError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        reason = printable(f"{type(error).__name__}: {error}", 150)
    except (RecursionError, ImportError, SystemError, AssertionError) as error:  # of the unpickler
        reason = type(error).__name__
    raise UserError(f"{name} is not a PyTorch memory snapshot: {reason}")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise _NotASnapshot(f"it asks to import {module}.{name}; snapshots hold plain data only")

    def persistent_load(self, pid: Any) -> Any:
        raise _NotASnapshot("it refers to objects outside of the file")


def _unpickle(data: bytes) -> Any:
    with _limited_memory(2**30 + _MEMORY_PER_BYTE * len(data)):
        return _PlainUnpickler(io.BytesIO(data)).load()


@contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """A few bytes of a pickle can ask for any amount of memory; with a limit they fail."""
    try:
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, ValueError):  # not Linux
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    hard = before[1]
    wanted = used + more if hard == resource.RLIM_INFINITY else min(used + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, before)


# ------------------------------------------------------------------------------------------ checked parts


def _field(entry: Any, name: str, kind: type) -> Any:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _NotASnapshot(f"an entry has no {name!r}")
    return value


def _size(entry: Any, name: str) -> int:
    value: int = _field(entry, name, int)
    if not 0 <= value < _MOST_BYTES:
        raise _NotASnapshot(f"{name} {printable(hex(value), 40)} is out of range")
    return value


class _Origin(NamedTuple):
    """What a stack says about an allocation."""

    site: Site | None
    stage: Stage
    op: str
    module: str


class _Block(NamedTuple):
    size: int
    state: str
    frames: Any
    requested: int


class _Recording:
    """The events of the device with the longest trace, from before its first entry to the snapshot."""

    def __init__(self, found: Any) -> None:
        segments, traces = _field(found, "segments", list), _field(found, "device_traces", list)
        if not all(isinstance(trace, list) for trace in traces):
            raise _NotASnapshot("a trace is not a list")
        self.device = max(range(len(traces)), key=lambda i: len(traces[i]), default=0)
        self.trace: list[Any] = traces[self.device] if traces else []
        devices = {_size(segment, "device") if "device" in segment else 0 for segment in segments}
        if not self.trace and devices:
            self.device = min(devices)
        self.segments = [one for one in segments if one.get("device", 0) == self.device]
        self.blocks = dict(self._blocks())
        self.allocations: list[Allocation] = []
        self.events: list[Event] = []
        self.timeline: list[Moment] = []
        self._origins: dict[int, _Origin] = {}  # by id of the list of frames, which the pickle keeps alive

    def _blocks(self) -> Iterator[tuple[int, _Block]]:
        for segment in self.segments:
            address = _size(segment, "address")
            for block in _field(segment, "blocks", list):
                at = _size(block, "address") if "address" in block else address  # absent in old files
                size = _size(block, "size")
                requested = _size(block, "requested_size") if "requested_size" in block else size
                yield at, _Block(size, str(block.get("state")), block.get("frames"), requested)
                address = at + size

    def record(self, name: str) -> Prediction:
        blocks = {at: one for at, one in self.blocks.items() if one.state.startswith("active")}
        self._before(blocks)
        refused = self._replay()
        self._mark_gradients()
        return self._prediction(name, refused)

    # ------------------------------------------------------------------------------------- events

    def _before(self, blocks: dict[int, _Block]) -> None:
        """What was alive when the trace began: freed in it, or alive at its end, and not allocated in it."""
        self.alive: dict[int, int] = {}  # address: id
        self.sizes: list[int] = []  # of blocks, by id
        allocated: set[int] = set()
        reserved = sum(_size(segment, "total_size") for segment in self.segments)
        before: list[tuple[int, int, int, Any]] = []
        for entry in self.trace:
            action = _field(entry, "action", str)
            if action in ("segment_alloc", "segment_map"):
                reserved -= _size(entry, "size")
            elif action in ("segment_free", "segment_unmap"):
                reserved += _size(entry, "size")
            elif action == "alloc":
                allocated.add(_size(entry, "addr"))
            elif action in ("free", "free_completed") and _size(entry, "addr") not in allocated:
                allocated.add(_size(entry, "addr"))
                before.append((_size(entry, "addr"), _size(entry, "size"), _size(entry, "size"), None))
        for address, block in blocks.items():
            if address not in allocated:
                before.append((address, block.size, block.requested, block.frames))
        self.allocated = 0
        self.reserved = max(0, reserved)
        for address, size, requested, frames in before:
            origin = (
                self._origin(frames) if frames else _Origin(None, "parameters", "before the recording", "")
            )
            self._alloc(address, size, requested, origin, "")
        self.reserved = max(self.reserved, self.allocated)
        self.unexplained = sum(not frames for *_, frames in before)

    def _alloc(self, address: int, size: int, requested: int, origin: _Origin, text: Any) -> None:
        site, stage, op, module = origin
        shape: tuple[int, ...] = ()
        dtype = ""
        if isinstance(text, str) and (
            described := _OWN_METADATA.fullmatch(text[:500])
        ):  # by `oomph --snapshot`
            shape = tuple(int(one) for one in described[1].split(",") if one.strip())
            dtype = described[2]
            stage = described[3] if described[3] in STAGES else stage  # type: ignore[assignment]
        kind: Any = "parameter" if stage == "parameters" else "activation"
        id = len(self.allocations)
        self.allocations.append(
            Allocation(id, requested, shape, dtype, op, module, site, stage, kind, step=0)
        )
        self.sizes.append(size)
        self.alive[address] = id
        self._event("alloc", id, size)

    def _event(self, action: Any, id: int, change: int) -> None:
        self.allocated += change
        self.events.append(Event(action, id))
        self.timeline.append(Moment(len(self.events) - 1, self.allocated, max(self.reserved, self.allocated)))

    def _replay(self) -> Allocation | None:
        """The last request that failed, if nothing was allocated after it; `failed_at` is when."""
        refused = None
        self.failed_at = -1
        for entry in self.trace:
            match entry["action"]:
                case "alloc":
                    size, address = _size(entry, "size"), _size(entry, "addr")
                    # The trace has the requested size; blocks are multiples of 512 bytes.
                    block = -(-size // 512) * 512
                    if address in self.alive:  # its free is missing
                        self._free(address)
                    self._alloc(
                        address, block, size, self._origin(entry.get("frames")), entry.get("user_metadata")
                    )
                    refused = None
                case "free" | "free_completed":
                    self._free(_size(entry, "addr"))
                case "segment_alloc" | "segment_map":
                    self.reserved += _size(entry, "size")
                case "segment_free" | "segment_unmap":
                    self.reserved = max(0, self.reserved - _size(entry, "size"))
                case "oom":
                    site, stage, op, module = self._origin(entry.get("frames"))
                    size, self.failed_at = _size(entry, "size"), len(self.events) - 1
                    refused = Allocation(-1, size, (), "", op, module, site, stage, "activation", step=0)
        return refused

    def _free(self, address: int) -> None:
        id = self.alive.pop(address, None)
        if id is not None:
            self._event("free", id, -self.sizes[id])

    def _mark_gradients(self) -> None:
        """What backward makes and the optimizer still finds is a gradient."""
        steps = [
            index
            for index, (action, id, _) in enumerate(self.events)
            if action == "alloc" and self.allocations[id].stage in ("optimizer step", "optimizer state")
        ]
        freed = {id: index for index, (action, id, _) in enumerate(self.events) if action == "free"}
        for index, (action, id, _) in enumerate(self.events):
            if action == "alloc" and self.allocations[id].stage == "backward":
                after = bisect_right(steps, index)
                if after < len(steps) and freed.get(id, len(self.events)) > steps[after]:
                    self.allocations[id] = self.allocations[id]._replace(stage="gradients", kind="gradient")

    # ------------------------------------------------------------------------------------- stacks

    def _origin(self, frames: Any) -> _Origin:
        if not isinstance(frames, list):
            return _Origin(None, "backward", "", "")
        if id(frames) not in self._origins:
            self._origins[id(frames)] = _origin(frames)
        return self._origins[id(frames)]

    # ------------------------------------------------------------------------------------- the record

    def _prediction(self, name: str, refused: Allocation | None) -> Prediction:
        peak = max(self.timeline, key=lambda moment: moment.allocated, default=Moment(0, 0, self.reserved))
        if refused is not None and self.failed_at >= 0:  # what was freed later does not matter
            del self.events[self.failed_at + 1 :], self.timeline[self.failed_at + 1 :]
            peak = self.timeline[-1]
        alive = alive_after(self.events, self.timeline, [peak.event])[0] if self.events else {}
        at_peak = [Alive(size, self.allocations[id]) for id, size in alive.items()]
        at_peak.sort(key=lambda one: -one.bytes)
        last = self.events[peak.event].id if self.events else -1
        made = refused or (self.allocations[last] if last >= 0 else None)
        reserved = max(peak.reserved, self.reserved if refused is not None else 0)
        return Prediction(
            gpu=None,
            gpu_title="",
            capacity=None,
            limit=None,
            verdict=None,
            refused=refused,
            peak=Peak(
                peak.allocated,
                reserved,
                reserved,
                0,
                made.stage if made else None,
                made.site if made else None,
            ),
            steps=(),
            at_peak=tuple(at_peak),
            timeline=tuple(self.timeline),
            events=tuple(self.events),
            allocations=tuple(self.allocations),
            notes=tuple(self._notes(refused)),
            recorded=name,
        )

    def _notes(self, refused: Allocation | None) -> Iterator[Note]:
        free = sorted((one.size for one in self.blocks.values() if one.state == "inactive"), reverse=True)
        if free:
            text = (
                f"when the snapshot was taken, {format_bytes(sum(free))} were reserved and free, "
                f"in {counted(len(free), 'block')}, the largest of {format_bytes(free[0])}"
            )
            if refused is not None and free[0] < refused.bytes <= sum(free):
                text += (
                    f"; together they would hold the {format_bytes(refused.bytes)} asked for: fragmentation. "
                    "PYTORCH_ALLOC_CONF=expandable_segments:True lets the allocator join them"
                )
            yield Note(text)
        if self.unexplained:
            yield Note(
                f"alive before the recording, from unknown lines: {counted(self.unexplained, 'tensor')}"
            )
        if not self.trace:
            yield Note("no history was recorded: torch.cuda.memory._record_memory_history() was not called")


def _origin(frames: list[Any]) -> _Origin:
    """Innermost first. Without a line of Python: autograd's thread, which runs backward passes."""
    site: Site | None = None
    stage: Stage = "backward" if not frames else "forward activations"
    op = module = ""
    for frame in frames[:500]:
        if not isinstance(frame, dict):
            raise _NotASnapshot("a frame is not a dict")
        file, name = str(frame.get("filename", ""))[:4096], str(frame.get("name", ""))[:4096]
        line = frame.get("line")
        number = line if isinstance(line, int) and 0 <= line < 2**31 else 0
        if file == "op" and number == 0:  # as `oomph --snapshot` writes them
            op = name
        elif file == "module" and number == 0:
            module = name
        elif file.endswith(".py") or file.startswith("<"):
            stage = _stage(file, name, stage, site)
            if site is None and not _LIBRARIES.search(file):
                site = Site(file, number, name)
        elif not op and name.startswith("at::_ops::"):
            op = "aten." + name.removeprefix("at::_ops::").partition("::")[0].partition("(")[0]
    if (
        site is None
        and not op
        and not any(str(frame.get("filename", "")).endswith(".py") for frame in frames)
    ):
        stage = "backward"
    return _Origin(site, stage, op, module)


def _stage(file: str, name: str, found: Stage, site: Site | None) -> Stage:
    """By the functions of torch that the stack passes through."""
    if "/torch/optim/" in file:
        return "optimizer state" if name == "_init_group" or found == "optimizer state" else "optimizer step"
    if found != "forward activations":
        return found
    if file.endswith(("/torch/autograd/graph.py", "/torch/autograd/__init__.py")) and "backward" in name:
        return "backward"
    if file.endswith("/torch/nn/modules/module.py") and name in ("_apply", "convert"):
        return "parameters"
    if site is None and ("cross_entropy" in name or file.endswith("/torch/nn/modules/loss.py")):
        return "loss"
    return found
