"""Checkpoints of a run: written in the background, whole or not at all, the newest few kept."""

from __future__ import annotations

import errno
import json
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from oomph.errors import ArgumentError, UserError
from oomph.training.checkpoints import folders
from oomph.training.checkpoints.manifest import STATE, TENSORS, Unsound, write_manifest
from oomph.training.checkpoints.saved import Saved, load, look_at, newest
from oomph.training.checkpoints.staging import HostCopies, copies_done
from oomph.training.checkpoints.storage import collect
from oomph.training.checkpoints.tensor_file import write_bytes, write_tensors
from oomph.training.checkpoints.tree import take_apart
from oomph.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPARE = 1 << 20  # bytes beside the tensors and the JSON: headers, the manifest, the folder itself


class Checkpoints:
    """The checkpoints in `folder`, of which the newest `keep` stay.

    A checkpoint is a folder: tensors.safetensors, state.json (all that is not a tensor) and manifest.json
    (sizes and checksums). It is written under another name, brought to disk and renamed, so that a process
    killed at any moment leaves whole ones only. Older ones go after the new one stands: the disk needs room
    for `keep + 1`.

    Asynchronous: `save` copies the state to the host (see staging.py for what that costs) and a thread writes
    it; the next `save` waits for that thread. What goes wrong there is raised by the next `save`, `wait` or
    `close`. Otherwise `save` writes straight from where the tensors are, one of them on the host at a time.

    One run at a time writes to a folder.
    """

    def __init__(self, folder: str | Path, keep: int = 3, asynchronous: bool = True) -> None:
        if type(keep) is not int or keep < 1:
            raise ArgumentError(
                f"keep={keep!r} is not valid; give the number of checkpoints to keep, 1 or more"
            )
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file; checkpoints need a folder")
        folders.clean(self.folder)
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._passed_over: frozenset[Path] = frozenset()  # by the last look at what they contain

    def save(self, step: int, state: dict[str, Any]) -> None:
        """`state`: nested dictionaries of tensors and plain data. It may change once this returns."""
        if type(step) is not int or step < 0:
            raise ArgumentError(f"step={step!r} is not valid; give the number of steps done, 0 or more")
        self.wait()
        parts = take_apart(state)
        text = json.dumps(parts.structure, separators=(",", ":"), allow_nan=False).encode()
        needed = sum(t.numel() * t.dtype.itemsize for t in parts.tensors.values()) + len(text) + _SPARE
        self._make_room(step, needed)
        if self.asynchronous and self._stage(step, parts.tensors, text, needed):
            return
        self._write(step, collect(parts.tensors, lambda tensors: tensors), text, needed)

    def wait(self) -> None:
        """Until the last save is on disk; raises what went wrong with it, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """As `wait`; also gives back the host's copy of the state."""
        try:
            self.wait()
        finally:
            self._copies.release()

    def latest(self) -> Saved | None:
        """The newest checkpoint that verifies to the last byte (about 1 s per GB), None where there are none.
        Its `warnings` name newer ones that do not."""
        found = newest(self.folder)
        self._passed_over = frozenset(() if found is None else found.passed_over)
        return found

    def all(self) -> list[Saved]:
        """Every checkpoint whose manifest and file sizes are right, oldest first."""
        found = []
        for _, path in folders.named(self.folder):
            try:
                found.append(look_at(path, contents=False))
            except Unsound:
                continue
        return found

    def load(self, saved: Saved, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return load(saved, into)

    def _stage(self, step: int, tensors: dict[str, Tensor], text: bytes, needed: int) -> bool:
        """Whether a thread writes it: not when the host has no room for a copy."""
        try:
            copies = collect(tensors, self._copies.take)
        except (RuntimeError, MemoryError) as problem:
            if isinstance(problem, RuntimeError) and "can't allocate memory" not in str(problem):
                raise
            self._copies.release()
            warnings.warn(
                f"the host has no room for a copy of the state ({format_bytes(needed)}): "
                "training waits while each checkpoint is written",
                stacklevel=3,
            )
            return False
        events = copies_done(tensors)

        def work() -> None:
            try:
                for event in events:
                    event.synchronize()
                self._write(step, copies, text, needed)
            except BaseException as problem:
                self._failure = problem

        # Not a daemon: a program that ends without close() still finishes its last checkpoint.
        self._thread = threading.Thread(target=work, name=f"checkpoint of step {step}")
        self._thread.start()
        return True

    def _make_room(self, step: int, needed: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UserError(f"cannot make the folder {self.folder}: {problem.strerror}") from None
        if (free := self._free()) < needed:
            raise self._full(step, needed, free)

    def _write(self, step: int, tensors: dict[str, Tensor], text: bytes, needed: int) -> None:
        def write(partial: Path) -> None:
            files = (
                write_tensors(partial / TENSORS, tensors, {"format": "pt", "step": str(step)}),
                write_bytes(partial / STATE, text),
            )
            write_manifest(partial, step, files)

        try:
            new = folders.create(self.folder, step, write)
        except OSError as problem:
            if problem.errno in _FULL:
                raise self._full(step, needed, self._free()) from None
            raise UserError(
                f"could not save step {step} in {self.folder}: {problem.strerror}; "
                "earlier checkpoints are as they were"
            ) from None
        self._rotate(step, new)

    def _rotate(self, step: int, new: Path) -> None:
        """Delete the oldest beyond `keep`, and what was saved before of the new one's step. What is not sound
        does not count and stays."""
        older = [saved for saved in self.all() if saved.folder != new]
        replaced = [saved for saved in older if saved.step == step]
        others = [saved for saved in older if saved.step != step and saved.folder not in self._passed_over]
        try:
            for saved in [*replaced, *others[: max(len(others) - (self.keep - 1), 0)]]:
                folders.delete(saved.folder)
        except OSError as problem:
            raise UserError(
                f"step {step} is saved, but an older checkpoint in {self.folder} could not be deleted: "
                f"{problem.strerror}"
            ) from None

    def _free(self) -> int:
        try:
            disk = os.statvfs(self.folder)
        except OSError as problem:
            raise UserError(f"cannot save in {self.folder}: {problem.strerror}") from None
        return disk.f_bavail * disk.f_frsize

    def _full(self, step: int, needed: int, free: int) -> UserError:
        return UserError(
            f"no room on disk for the checkpoint of step {step}: it needs {format_bytes(needed)} "
            f"({needed} bytes) and {self.folder} has {format_bytes(free)} ({free} bytes) free; "
            "checkpoints before it are as they were; make room or keep fewer, and go on with --resume"
        )
