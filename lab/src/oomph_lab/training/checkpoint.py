"""Checkpoints of a run, over torch.distributed.checkpoint (DCP).

A checkpoint is a folder: tensors in safetensors files, written and read by DCP's Hugging Face storage, which
needs no pickle; state.json with everything that is not a tensor; and manifest.json with the size and SHA-256
of every file, written last. The folder is written under a temporary name, synced to disk and renamed, so a
process that is killed at any moment leaves complete checkpoints only. Nothing that is read is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from oomph import __version__
from oomph.errors import UserError
from oomph.units import MiB, format_bytes
from oomph_lab.training.checkpoint_state import decode, flatten, restored, stored_form

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT, VERSION = "oomph checkpoint", 2
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPARE = 1 << 20  # bytes beside the tensors and the JSON: headers, the manifest, the folder itself
# The writer holds a file in memory, twice, before it writes it; and it holds the GIL while it copies.
_FILE_BYTES = 128 * MiB
_LARGEST_MANIFEST = 16 * MiB
_NAME = re.compile(r"step-([0-9]{8,})(?:-([0-9]+))?")
_TENSOR_FILE = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_ADVICE = "delete that folder to use the checkpoint before it"

# DCP says this at each call without a process group. The filter is for all threads, since a thread has none
# of its own and checkpoints are written by one.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(UserError):
    """A checkpoint cannot be used: which file, and why."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    files: name -> {"size", "sha256"}. verified: the contents were compared with the hashes.
    skipped: newer checkpoints that are corrupt -> why; see `Checkpoints.latest`.
    """

    folder: Path
    step: int
    files: Mapping[str, Mapping[str, Any]]
    verified: bool = False
    skipped: Mapping[Path, str] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints in `folder`, of which the newest `keep` stay.

    Older ones are deleted after the new one is complete: the disk needs room for `keep + 1`.

    `save` copies the state to the host and a thread writes it. The next `save` waits for that thread; its
    errors are raised by the next `save`, `wait` or `close`. If the host has no room for a copy, `save` writes
    before it returns, with one file's tensors on the host at a time.

    Only one process may save to a folder at a time.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder, self.keep = Path(folder), keep
        self._host_copy = _HostCopy()
        self._pending: Future[None] | None = None  # the last save
        self._corrupt: frozenset[Path] = frozenset()  # found by `latest`

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save nested dictionaries of tensors and plain data. They may change once this returns."""
        self.wait()
        structure, tensors = flatten(state)
        text = json.dumps(structure, separators=(",", ":")).encode()
        needed = sum(tensor.nbytes for tensor in tensors.values()) + len(text) + _SPARE
        self.folder.mkdir(parents=True, exist_ok=True)
        if (free := self._free_bytes()) < needed:
            raise self._disk_full(step, needed, free)
        if not self._save_in_thread(step, tensors, text, needed):
            self._write(step, tensors, text, needed)

    def wait(self) -> None:
        """Wait until the last save is on disk; raise its error, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """As `wait`; also free the host's copy of the state."""
        try:
            self.wait()
        finally:
            self._host_copy.free()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint whose files match their hashes; None if there are none."""
        found = newest(self.folder)
        self._corrupt = frozenset(() if found is None else found.skipped)
        return found

    def all(self) -> list[Checkpoint]:
        """Every checkpoint whose manifest and file sizes are right, oldest first."""
        found = []
        for path in _named(self.folder):
            with contextlib.suppress(CheckpointError, OSError):
                found.append(open_checkpoint(path, verify=False))
        return found

    def _save_in_thread(self, step: int, tensors: dict[str, Tensor], text: bytes, needed: int) -> bool:
        """False if the host has no room for a copy of the state."""
        try:
            copies, events = self._host_copy.take(tensors)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
                raise
            self._host_copy.free()
            warnings.warn(
                f"the host has no room for a copy of the state ({format_bytes(needed)}): "
                "training waits while each checkpoint is written",
                stacklevel=3,
            )
            return False

        def write() -> None:
            for event in events:
                event.synchronize()
            self._write(step, copies, text, needed)

        # The interpreter waits for the thread: a program that ends without close() has its last checkpoint.
        executor = ThreadPoolExecutor(1, f"checkpoint of step {step}")
        self._pending = executor.submit(write)
        executor.shutdown(wait=False)
        return True

    def _write(self, step: int, tensors: dict[str, Tensor], text: bytes, needed: int) -> None:
        partial = self.folder / f".saving-step-{step:08d}"
        try:
            for leftover in (*self.folder.glob(".saving-*"), *self.folder.glob(".deleting-*")):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir()
            (partial / STATE).write_bytes(text)
            _write_tensors(partial, tensors)
            _write_manifest(partial, step)
            new = _unused_name(self.folder, step)
            os.rename(partial, new)
            _sync(self.folder)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise self._disk_full(step, needed, self._free_bytes()) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._rotate(step, new)

    def _rotate(self, step: int, new: Path) -> None:
        """Delete the oldest beyond `keep`, and an earlier save of the same step. Corrupt ones stay, and do
        not count."""
        older = [saved for saved in self.all() if saved.folder != new]
        others = [saved for saved in older if saved.step != step and saved.folder not in self._corrupt]
        replaced = [saved for saved in older if saved.step == step]
        for saved in [*replaced, *others[: max(len(others) - (self.keep - 1), 0)]]:
            # Renamed first, so that a half-deleted folder is never taken for a checkpoint.
            doomed = saved.folder.with_name(f".deleting-{saved.folder.name}")
            os.rename(saved.folder, doomed)
            shutil.rmtree(doomed)

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def _disk_full(self, step: int, needed: int, free: int) -> UserError:
        return UserError(
            f"no room on disk for the checkpoint of step {step}: it needs {format_bytes(needed)} "
            f"({needed} bytes) and {self.folder} has {format_bytes(free)} ({free} bytes) free; earlier "
            "checkpoints are unchanged; make room or keep fewer, and continue with --resume"
        )


# ---------------------------------------------------------------------------------------- finding


def find(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: the folder of one, or the newest in a folder of several."""
    path = Path(path)
    if (path / MANIFEST).exists():
        return open_checkpoint(path, verify=True)
    found = newest(path)
    if found is None:
        raise UserError(
            f"{path} is not a checkpoint of oomph, which is a folder like step-00000100; files of torch.save "
            "and of DCP's default storage are pickles, which may execute code, and are not read"
        )
    return found


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in `folder` that verifies (about 1 s per GB), None if there are no checkpoints.

    Raises if there are some and none verifies: a run must not silently start again."""
    skipped: dict[Path, str] = {}
    for path in reversed(_named(folder)):
        try:
            return replace(open_checkpoint(path, verify=True), skipped=skipped)
        except (CheckpointError, OSError) as error:
            skipped[path] = str(error).removesuffix(f"; {_ADVICE}")
    if skipped:
        first, *more = skipped.values()
        older = f" (and {len(more)} older)" if more else ""
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {first}{older}; to start again, give another output.dir"
        )
    return None


def open_checkpoint(folder: Path, verify: bool) -> Checkpoint:
    """Read the manifest and check that the files have its sizes and, with `verify`, its hashes."""
    step, files = _read_manifest(folder)
    for name, file in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; {_ADVICE}")
        size = path.stat().st_size
        if size != file["size"]:
            raise CheckpointError(
                f"{path} is corrupt: {format_bytes(size)} ({size} bytes) where {file['size']} bytes "
                f"were written; {_ADVICE}"
            )
        if verify and _sha256(path) != file["sha256"]:
            raise CheckpointError(f"{path} is corrupt: its contents do not match their hash; {_ADVICE}")
    return Checkpoint(folder, step, files, verify)


def _named(folder: Path) -> list[Path]:
    """Folders with the name of a checkpoint, oldest first; of one step, the last saved last."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(filter(_step_and_copy, folder.iterdir()), key=_step_and_copy)
    return []


def _step_and_copy(path: Path) -> tuple[int, int]:
    """Of step-00000100 or step-00000100-2; empty for other names."""
    match = _NAME.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 1)) if match else ()  # type: ignore[return-value]


def _unused_name(folder: Path, step: int) -> Path:
    """A step that a run resumed from further back saves again gets a second folder: replacing the first
    would leave a moment without either."""
    copies = [copy for saved, copy in map(_step_and_copy, _named(folder)) if saved == step]
    return folder / (f"step-{step:08d}" + (f"-{copies[-1] + 1}" if copies else ""))


# --------------------------------------------------------------------------------------- manifest


def _write_manifest(folder: Path, step: int) -> None:
    """Describe and sync every file of the folder."""
    files = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "files": files}
    manifest |= {"oomph": __version__, "torch": str(torch.__version__)}
    text = json.dumps({**manifest, "sha256": _own_hash(manifest)}, indent=1)
    with (folder / MANIFEST).open("w") as new:
        new.write(text)
        new.flush()
        os.fsync(new.fileno())
    _sync(folder)


def _read_manifest(folder: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            manifest = json.loads(file.read(_LARGEST_MANIFEST))
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint of oomph (format {FORMAT!r})")
        if manifest["version"] != VERSION:
            raise CheckpointError(
                f"{path} has version {manifest['version']!r} of the format, and this oomph reads {VERSION}; "
                f"it was written by oomph {str(manifest.get('oomph'))[:20]}: continue with that one"
            )
        own_hash, step, files = manifest.pop("sha256"), manifest["step"], manifest["files"]
        names = {name for name in files if name not in (STATE, "model.safetensors.index.json")}
        entries = [(type(step), type(file["size"]), type(file["sha256"])) for file in files.values()]
        # A manifest cannot lead out of its folder, and DCP's reader reads no other file.
        on_disk = {entry.name for entry in folder.glob("*.safetensors")}
        valid = own_hash == _own_hash(manifest) and STATE in files and set(entries) == {(int, int, str)}
        valid = valid and on_disk <= names and all(map(_TENSOR_FILE.fullmatch, names))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise CheckpointError(f"{path} is corrupt; {_ADVICE}")
    return step, files


def _own_hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """The names in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------- tensors


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    if not tensors:
        return
    file_of: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _FILE_BYTES:
            number, size = number + 1, 0
        file_of[name], size = number, size + tensor.nbytes
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of)
    with _plain_errors():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)


def load(checkpoint: Checkpoint, into: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The saved state. Tensors are new, on the host, except those under a key of `into`: these are filled in
    place and returned.

    into: nested like the state; it may have fewer keys. Under its keys it must have the same tensors, with
    the same shapes and dtypes; otherwise the error names the differences and nothing is filled. Tensors that
    shared memory when saved do so again.
    """
    if not checkpoint.verified:
        open_checkpoint(checkpoint.folder, verify=True)
    path = checkpoint.folder / STATE
    try:
        structure = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is corrupt: it is not JSON; {_ADVICE}") from None
    with malformed_errors(checkpoint):
        return _load(checkpoint, structure, dict(into or {}))


@contextlib.contextmanager
def malformed_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Around the use of what a checkpoint holds. Its hashes are right, so an error comes from a file that
    `save` did not write, which may be wrong in any way."""
    try:
        yield
    except (UserError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        line = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{checkpoint.folder} is malformed ({type(error).__name__}: {line}); {_ADVICE}"
        ) from error


def _load(checkpoint: Checkpoint, structure: Any, into: dict[str, Any]) -> dict[str, Any]:
    marks: dict[str, dict[str, Any]] = {}
    decode(structure, marks.__setitem__)
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    reader = HuggingFaceStorageReader(str(checkpoint.folder))
    if marks:
        for name, entry in reader.read_metadata().state_dict_metadata.items():
            stored[name] = (tuple(entry.size), entry.properties.dtype)  # type: ignore[union-attr]
    if {mark["$tensor"] for mark in marks.values()} != stored.keys():
        raise ValueError(f"the files do not hold the tensors that {STATE} names")
    own = dict(_own_tensors(into))
    saved = {
        name: stored_form(mark, *stored[mark["$tensor"]])
        for name, mark in marks.items()
        if name.partition(".")[0] in into
    }
    _check_same_tensors(checkpoint, saved, {name: (tuple(t.shape), t.dtype) for name, t in own.items()})

    read: dict[str, Tensor] = {}
    for name, (shape, dtype) in stored.items():
        in_place = name in own and "dtype" not in marks[name]
        read[name] = own[name].detach() if in_place else torch.empty(shape, dtype=dtype)
    if read:
        with _plain_errors():
            dcp.load(dict(read), storage_reader=reader, no_dist=True)
    shared: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, mark in marks.items():
        tensor = shared.setdefault(mark["$tensor"], restored(mark, read[mark["$tensor"]]))
        if name in own:
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].detach().copy_(tensor)
            tensor = own[name]
        tensors[name] = tensor
    state = decode(structure, lambda name, _: tensors[name])
    if not isinstance(state, dict):
        raise TypeError(f"{STATE} holds no state")
    return state


def _own_tensors(value: Any, name: str = "") -> Any:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _own_tensors(item, f"{name}.{key}" if name else str(key))


def _check_same_tensors(checkpoint: Checkpoint, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    def form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
        return f"{list(shape)} {str(dtype).removeprefix('torch.')}"

    problems = []
    if missing := [name for name in here if name not in there]:
        problems.append(f"missing from it: {_first_few(missing)}")
    if unexpected := [name for name in there if name not in here]:
        problems.append(f"not in the model: {_first_few(unexpected)}")
    if different := [name for name in here if name in there and there[name] != here[name]]:
        forms = [f"{name} is {form(*there[name])} there and {form(*here[name])} here" for name in different]
        problems.append(_first_few(forms))
    if problems:
        raise UserError(
            f"{checkpoint.folder} does not fit this model: {'; '.join(problems)}; resume with the config it "
            "was saved with, or save into another folder"
        )


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what failed inside DCP itself: its CheckpointException is not an Exception."""
    try:
        yield
    except CheckpointException as failed:
        cause = next(iter(failed.failures.values()))[0]
        raise cause from None


class _HostCopy:
    """One host buffer for a copy of the state, so that training continues while a thread writes.

    It is kept from the first save to `free`: a host that had room once must have room at the next save
    anyway, and new memory would have to be faulted in page by page each time. The GPU needs no extra memory.
    """

    ALIGNMENT = 64  # bytes, enough for every dtype

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.registered = False

    def take(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[torch.cuda.Event]]:
        """Copies of contiguous tensors; they are complete after the events.

        GPU copies are queued on the current stream, so the next optimizer step runs after them and the host
        does not wait."""
        sizes = [-(-tensor.nbytes // self.ALIGNMENT) * self.ALIGNMENT for tensor in tensors.values()]
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        buffer = self._allocate(sum(sizes), pinned=bool(devices))
        copies, offset = {}, 0
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            flat = buffer[offset : offset + tensor.nbytes].view(tensor.dtype)
            copies[name] = flat.view(tensor.shape).copy_(tensor, non_blocking=True)
            offset += size
        events = []
        for device in devices:
            with torch.cuda.device(device):
                events.append(torch.cuda.Event())
                events[-1].record()
        return copies, events

    def _allocate(self, size: int, pinned: bool) -> Tensor:
        if self.buffer is None or self.buffer.numel() < size or (pinned and not self.registered):
            self.free()
            self.buffer = torch.empty(size, dtype=torch.uint8)
            if pinned and size:
                # Page-locked in place: torch's pinned allocator rounds up to a power of two.
                failed = torch.cuda.cudart().cudaHostRegister(self.buffer.data_ptr(), size, 0)
                self.registered = int(failed) == 0
                if not self.registered:
                    # Copies are slower, but correct. The next kernel would report the failure again.
                    with contextlib.suppress(RuntimeError):
                        torch.zeros(1, device="cuda")
        return self.buffer

    def free(self) -> None:
        if self.registered and self.buffer is not None:
            torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())
        self.buffer, self.registered = None, False

    def __del__(self) -> None:
        self.free()
