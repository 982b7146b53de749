"""The book of the pretend GPU: which storages are on it, and every allocation and free in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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


class Ledger:
    """Storages are known by their C++ identity; a weak reference tells when one is gone."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.drafts: list[Draft] = []
        self.notes: dict[Note, None] = {}  # in order, each once
        self.live_bytes = 0
        self._storages: dict[int, tuple[Draft, weakref.ref[torch.UntypedStorage]]] = {}

    def mark(self, label: str) -> None:
        self.events.append(Event("mark", -1, label))

    def note(self, text: str, site: Site | None = None) -> None:
        self.notes[Note(text, site)] = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the pretend GPU."""
        return tensor.untyped_storage()._cdata in self._storages

    def draft_of(self, tensor: torch.Tensor) -> Draft | None:
        entry = self._storages.get(tensor.untyped_storage()._cdata)
        return entry[0] if entry else None

    def alive(self) -> Iterator[Draft]:
        return (draft for draft, _ in self._storages.values())

    def adopt(
        self, tensor: torch.Tensor, describe: Callable[[int, int, torch.Tensor], Draft]
    ) -> Draft | None:
        """Book the tensor's storage as a new allocation, unless it is known already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return None
        draft = describe(len(self.drafts), storage.nbytes(), tensor)
        self.drafts.append(draft)
        self.events.append(Event("alloc", draft.id))
        self.live_bytes += draft.bytes

        def gone(_: object, key: int = key, draft: Draft = draft) -> None:
            del self._storages[key]
            self._free(draft)

        self._storages[key] = (draft, weakref.ref(storage, gone))
        return draft

    def hold(self, draft: Draft) -> None:
        """Book an allocation that no tensor shows, kept until `release` or for good."""
        self.drafts.append(draft)
        self.events.append(Event("alloc", draft.id))
        self.live_bytes += draft.bytes

    def release(self, draft: Draft) -> None:
        self._free(draft)

    def _free(self, draft: Draft) -> None:
        self.live_bytes -= draft.bytes
        self.events.append(Event("free", draft.id))

    def close(self) -> None:
        """Stop listening: what dies after the trace is not part of it."""
        self._storages.clear()
