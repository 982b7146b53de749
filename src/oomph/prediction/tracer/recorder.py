"""The record of the fake GPU: which storages are on it, and every allocation and free in order."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch

from oomph.prediction.garbage import without_collection
from oomph.records import CUDNN_SEARCH, Allocation, Event, Kind, Note, Site, Stage
from oomph.torch_internals import (
    FakeTensor,
    functorch_unwrapped,
    is_functorch_wrapped,
    is_traceable_wrapper_subclass,
    storage_id,
)

_STAGE_OF_KIND: dict[Kind, Stage] = {
    "parameter": "parameters",
    "buffer": "parameters",
    "gradient": "gradients",
    "optimizer state": "optimizer state",
    "weight average": "weight averages",
    "batch": "batch",
    "workspace": "workspace",
}


# Of a tuple. There are hundreds of thousands, and a named tuple's own constructor is a function in Python.
_event = functools.partial(tuple.__new__, Event)


@dataclass(slots=True)
class PendingAllocation:
    """An Allocation whose kind may still change: what it became (a gradient) is often known later."""

    id: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    site: Site | None
    during: Stage
    step: int
    kind: Kind
    saved: bool = False
    stream: int = 0
    parent: int | None = None
    call: int = 0
    differentiable: bool = False
    most: int | None = None
    cloned: bool = False  # a copy of another tensor; of a parameter, perhaps to average it

    def description(self) -> tuple[Any, ...]:
        """What two allocations have in common that the same line makes for the same purpose."""
        return self.bytes, self.shape, self.dtype, self.op, self.module, self.site, self.during, self.stream

    @property
    def stage(self) -> Stage:
        return _STAGE_OF_KIND.get(self.kind, self.during)

    def again(self, id: int, step: int) -> PendingAllocation:
        """A copy; dataclasses.replace takes many times as long."""
        new = PendingAllocation(*_fields_of_pending(self))
        new.id, new.step = id, step
        return new

    def finish(self) -> Allocation:
        return Allocation._make(_fields_of_allocation(self))


_fields_of_pending = attrgetter(*(each.name for each in fields(PendingAllocation)))
_fields_of_allocation = attrgetter(*Allocation._fields)
Describe = Callable[[int, int, torch.Tensor], PendingAllocation]  # of an id, a size in bytes and the tensor


def inner_tensors(tensor: torch.Tensor) -> Iterator[FakeTensor]:
    """The fake tensors that hold a tensor's data: itself, or those inside of a wrapper."""
    if isinstance(tensor, FakeTensor):
        yield tensor
    elif type(tensor) is torch.Tensor and is_functorch_wrapped(tensor):
        yield from inner_tensors(functorch_unwrapped(tensor))
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor, name))


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The indices and values of a sparse tensor; a dense one itself."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


class AllocationRecorder:
    """Storages are identified by their C++ identity; a weak reference reports when one is freed."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.allocations: list[PendingAllocation] = []  # by id
        self.notes: dict[Note, None] = {}  # in order, each once
        self.live_bytes = 0
        self._streams_recorded = False
        self.peak_bytes = 0  # as torch.cuda.max_memory_allocated gives the program
        self._storages: dict[int, tuple[PendingAllocation, weakref.ref[torch.UntypedStorage]]] = {}

    def mark(self, label: str) -> None:
        self.events.append(Event("mark", -1, label))

    def note(self, text: str, site: Site | None = None) -> None:
        self.notes[Note(text, site)] = None

    def note_once(self, text: str, site: Site | None) -> None:
        """Note the first line that causes it; other lines would only repeat it."""
        if not any(note.text == text for note in self.notes):
            self.note(text, site)

    def is_on_gpu(self, tensor: torch.Tensor) -> bool:
        try:
            return storage_id(tensor.untyped_storage()) in self._storages
        except NotImplementedError:  # a sparse tensor is where its values are
            return self.is_on_gpu(sparse_parts(tensor)[-1])

    def allocation_of(self, tensor: torch.Tensor) -> PendingAllocation | None:
        return self.allocation_of_storage(sparse_parts(tensor)[-1].untyped_storage())

    def allocation_of_storage(self, storage: torch.UntypedStorage) -> PendingAllocation | None:
        entry = self._storages.get(storage_id(storage))
        return entry[0] if entry else None

    def allocations_of(self, tensor: torch.Tensor) -> Iterator[PendingAllocation]:
        return filter(None, map(self.allocation_of, inner_tensors(tensor)))

    def live_allocations(self) -> Iterator[PendingAllocation]:
        return (allocation for allocation, _ in self._storages.values())

    def live_storages(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        found = [(allocation.id, ref()) for allocation, ref in self._storages.values()]
        return ((id, storage) for id, storage in found if storage is not None)

    def is_alive(self, id: int) -> bool:
        return any(allocation.id == id for allocation in self.live_allocations())

    def record_tensor(self, tensor: torch.Tensor, describe: Describe) -> None:
        """Record the tensor's storage as a new allocation, unless it is on the GPU already."""
        storage = tensor.untyped_storage()
        if storage_id(storage) in self._storages:
            return
        allocation = describe(len(self.allocations), storage.nbytes(), tensor)
        self.record_allocation(allocation)
        self.watch(storage, allocation)

    def record_tensor_resize(self, tensor: torch.Tensor, describe: Describe) -> None:
        """After an op that may have resized the tensor's storage: a storage of another size is a new one."""
        key = storage_id(tensor.untyped_storage())
        entry = self._storages.get(key)
        if entry is not None and entry[0].bytes != tensor.untyped_storage().nbytes():
            del self._storages[key]
            self.record_tensor(tensor, describe)  # the new one exists before the old one is freed
            self.record_free(entry[0])

    def record_storage_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """The same for a storage that was resized by itself."""
        entry = self._storages.get(storage_id(storage))
        if entry is None or entry[0].bytes == size:
            return
        old = entry[0]
        new = replace(old, id=len(self.allocations), bytes=size)
        self.record_allocation(new)
        self.record_free(old)
        self.watch(storage, new)

    def record_allocation(self, allocation: PendingAllocation) -> None:
        self.allocations.append(allocation)
        self.events.append(_event(("alloc", allocation.id, "")))
        self.live_bytes += allocation.bytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    def record_free(self, allocation: PendingAllocation) -> None:
        self.live_bytes -= allocation.bytes
        self.events.append(_event(("free", allocation.id, "")))

    @contextlib.contextmanager
    def fused(self) -> Iterator[None]:
        """What runs inside is one kernel: what it allocates and frees again is never stored."""
        first, peak = len(self.events), self.peak_bytes
        yield
        inside = self.events[first:]
        freed = {event.id for event in inside if event.action == "free"}
        freed &= {event.id for event in inside if event.action == "alloc"}
        self.events[first:] = [event for event in inside if event.id not in freed]
        self.peak_bytes = max(peak, self.live_bytes)

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None:
        """`stream` uses the tensor, too: its memory is not reused before that stream is done with it."""
        for allocation in self.allocations_of(tensor):
            if allocation.stream != stream:
                self.events.append(Event("mark", allocation.id, "record_stream"))
                self._streams_recorded = True

    def synchronize(self) -> None:
        """The host waits for the GPU; recorded where it decides what memory can be reused."""
        if self._streams_recorded:
            self.mark("synchronize")

    @without_collection()
    def repeat(self, events: Sequence[Event], step: int, record: bool = True) -> bool:
        """Record the events once more, as if what caused them ran again in `step`.

        False, and nothing is recorded, unless the events leave the memory as they found it: for each earlier
        allocation that they free, such as the loss before, they leave one like it, and one is alive now.
        `record=False` only says whether they do.
        """
        made = {event.id for event in events if event.action == "alloc"}
        freed = [event.id for event in events if event.action == "free"]
        left = made.difference(freed)
        alive: dict[Any, list[tuple[PendingAllocation, Any]]] = {}
        for allocation, ref in self._storages.values():
            alive.setdefault(allocation.description(), []).append((allocation, ref))
        new_ids: dict[int, int] = {}
        held: dict[Any, list[Any]] = {}  # references to the storages of the earlier allocations
        for id in freed:
            if id in made:
                continue
            description = self.allocations[id].description()
            if not alive.get(description):
                return False
            allocation, ref = alive[description].pop()
            new_ids[id] = allocation.id
            held.setdefault(description, []).append(ref)
        if Counter(self.allocations[id].description() for id in left) != Counter(
            {description: len(refs) for description, refs in held.items()}
        ):
            return False
        if not record:
            return True
        self.record_again(events, step, new_ids)
        for id in left:  # the program holds the earlier tensor, which stands for the new one from here on
            storage = held[self.allocations[id].description()].pop()()
            if storage is not None:
                self.watch(storage, self.allocations[new_ids[id]])
        return True

    def record_again(self, events: Sequence[Event], step: int, new_ids: dict[int, int]) -> None:
        """Record the events with new allocations, whose ids are added to `new_ids`."""
        for action, id, label in events:
            if id >= 0 and self.allocations[id].op == CUDNN_SEARCH:  # made once
                continue
            if action == "alloc":
                old = self.allocations[id]
                new = old.again(len(self.allocations), step)
                if old.parent is not None:
                    new.parent = new_ids.get(old.parent, old.parent)
                new_ids[id] = new.id
                self.record_allocation(new)
            elif action == "free":
                self.record_free(self.allocations[new_ids[id]])
            else:
                self.events.append(Event(action, new_ids.get(id, id), label))

    def close(self) -> None:
        """Stop recording frees: what is freed after the trace is not part of it."""
        self._storages.clear()

    def release(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage is freed now; whoever has it frees it later, without being watched."""
        self.record_free(self._storages.pop(storage_id(storage))[0])

    def watch(self, storage: torch.UntypedStorage, allocation: PendingAllocation) -> None:
        """Record the allocation as freed when the storage is."""
        key = storage_id(storage)

        def freed(_: object) -> None:
            del self._storages[key]
            self.record_free(allocation)

        self._storages[key] = (allocation, weakref.ref(storage, freed))


class PinnedMemory:
    """Host memory that a program pins."""

    def __init__(self) -> None:
        self.most = 0  # bytes at once
        self._alive: dict[int, tuple[int, Any]] = {}  # by storage

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key, size = storage_id(storage), storage.nbytes()
        if size and key not in self._alive:
            rounded = 1 << (size - 1).bit_length()  # as torch's CachingHostAllocator does
            self._alive[key] = rounded, weakref.ref(storage, lambda _: self._alive.pop(key))
            self.most = max(self.most, sum(each for each, _ in self._alive.values()))
        return tensor
