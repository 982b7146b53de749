"""The book of the pretend GPU: which storages are on it, and every allocation and free in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from oomph.records import Allocation, Event, Kind, Note, Site, Stage


@dataclass(slots=True)
class Draft:
    """An Allocation in the making: what it became (a gradient, say) is often known only later."""

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

    def finish(self) -> Allocation:
        became: dict[Kind, Stage] = {
            "parameter": "parameters",
            "buffer": "parameters",
            "gradient": "gradients",
            "optimizer state": "optimizer state",
            "batch": "batch",
            "workspace": "workspace",
        }
        return Allocation(
            id=self.id,
            bytes=self.bytes,
            shape=self.shape,
            dtype=self.dtype,
            op=self.op,
            module=self.module,
            site=self.site,
            stage=became.get(self.kind, self.during),
            kind=self.kind,
            step=self.step,
            saved=self.saved,
            during=self.during,
        )


Describe = Callable[[int, int, torch.Tensor], Draft]  # of an id, a size in bytes and the tensor


class Ledger:
    """Storages are known by their C++ identity; a weak reference tells when one is gone."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.drafts: list[Draft] = []
        self.notes: dict[Note, None] = {}  # in order, each once
        self.live_bytes = 0
        self.peak_bytes = 0  # as torch.cuda.max_memory_allocated tells the program
        self._storages: dict[int, tuple[Draft, weakref.ref[torch.UntypedStorage]]] = {}

    def mark(self, label: str) -> None:
        self.events.append(Event("mark", -1, label))

    def note(self, text: str, site: Site | None = None) -> None:
        self.notes[Note(text, site)] = None

    def note_first(self, text: str, site: Site | None) -> None:
        """With the first line that gives cause for it; the others would only repeat it."""
        if not any(note.text == text for note in self.notes):
            self.note(text, site)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the pretend GPU."""
        return tensor.untyped_storage()._cdata in self._storages

    def draft_of(self, tensor: torch.Tensor) -> Draft | None:
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def alive(self) -> Iterator[Draft]:
        return (draft for draft, _ in self._storages.values())

    def adopt(self, tensor: torch.Tensor, describe: Describe) -> Draft | None:
        """Book the tensor's storage as a new allocation, unless it is known already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return None
        draft = describe(len(self.drafts), storage.nbytes(), tensor)
        self.hold(draft)
        self._watch(storage, draft)
        return draft

    def _watch(self, storage: torch.UntypedStorage, draft: Draft) -> None:
        key = storage._cdata

        def gone(_: object) -> None:
            del self._storages[key]
            self._free(draft)

        self._storages[key] = (draft, weakref.ref(storage, gone))

    def rebook(self, tensor: torch.Tensor, describe: Describe) -> None:
        """After an op that may have resized the tensor's storage: a storage of another size is a new one."""
        key = tensor.untyped_storage()._cdata
        entry = self._storages.get(key)
        if entry is not None and entry[0].bytes != tensor.untyped_storage().nbytes():
            del self._storages[key]
            self.adopt(tensor, describe)  # the new one is there before the old one goes
            self._free(entry[0])

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """The same for a storage that was resized by itself."""
        entry = self._storages.get(storage._cdata)
        if entry is None or entry[0].bytes == size:
            return
        old = entry[0]
        new = replace(old, id=len(self.drafts), bytes=size)
        self.hold(new)
        self._free(old)
        self._watch(storage, new)

    def hold(self, draft: Draft) -> None:
        """Book an allocation that no tensor shows, kept until `release` or for good."""
        self.drafts.append(draft)
        self.events.append(Event("alloc", draft.id))
        self.live_bytes += draft.bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, draft: Draft) -> None:
        self._free(draft)

    def _free(self, draft: Draft) -> None:
        self.live_bytes -= draft.bytes
        self.events.append(Event("free", draft.id))

    def close(self) -> None:
        """Stop listening: what dies after the trace is not part of it."""
        self._storages.clear()
