"""What a checkpoint says about itself: manifest.json, the last file written and the first one read."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from oomph import __version__
from oomph.errors import UserError
from oomph.training.checkpoints.tensor_file import FileRecord, checksum, write_bytes
from oomph.units import format_bytes

NAME, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
FORMAT, VERSION = "oomph checkpoint", 1
_LARGEST = 1 << 20  # bytes of a manifest; ours have a few hundred
INSTEAD = "delete that folder, and the one before it is used"


class Unsound(UserError):
    """A checkpoint that cannot be used: which file, and why."""


@dataclass(frozen=True)
class Manifest:
    step: int
    oomph: str
    torch: str
    files: tuple[FileRecord, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def write_manifest(folder: Path, step: int, files: tuple[FileRecord, ...]) -> Manifest:
    manifest = Manifest(step, __version__, str(torch.__version__), files)
    said = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    said["files"] = [asdict(file) for file in files]
    text = json.dumps({**said, "crc32": _crc32(said)}, indent=1)
    write_bytes(folder / NAME, text.encode())
    return manifest


def read_manifest(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(_LARGEST))
    except FileNotFoundError:
        raise Unsound(f"{folder} is not a checkpoint of oomph: it has no {NAME}") from None
    except OSError as problem:
        raise Unsound(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError):
        raise Unsound(f"{path} is corrupt or not of oomph: it is not JSON; {INSTEAD}") from None
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise Unsound(f"{path} is not the manifest of a checkpoint of oomph (format {FORMAT!r})")
    if said.get("version") != VERSION:
        raise Unsound(
            f"{path} has version {said.get('version')!r} of the format, this oomph reads {VERSION}; "
            f"it was written by oomph {str(said.get('oomph'))[:20]}: use that one"
        )
    if said.pop("crc32", None) != _crc32(said):
        raise Unsound(f"{path} is corrupt: it does not match its own checksum; {INSTEAD}")
    try:
        return _checked(said)
    except (KeyError, TypeError, ValueError):
        raise Unsound(f"{path} is corrupt: it does not name a step and its files; {INSTEAD}") from None


def check_files(folder: Path, manifest: Manifest, contents: bool) -> None:
    """Every file is there with its size; with `contents`, also with its checksum (about 1 s per GB)."""
    for file in manifest.files:
        path = folder / file.name
        if not path.is_file():
            raise Unsound(f"{path} is missing; {INSTEAD}")
        size = path.stat().st_size
        if size != file.size:
            raise Unsound(
                f"{path} is corrupt: {format_bytes(size)} ({size} bytes) where {file.size} bytes "
                f"were written; {INSTEAD}"
            )
        try:
            if contents and checksum(path) != file.crc32:
                raise Unsound(f"{path} is corrupt: its contents do not match their checksum; {INSTEAD}")
        except OSError as problem:
            raise Unsound(f"{path} cannot be read: {problem.strerror}; {INSTEAD}") from None


def _checked(said: dict[str, Any]) -> Manifest:
    files = tuple(FileRecord(**file) for file in said["files"])
    # The two names are known: a manifest cannot lead out of its folder.
    if sorted(file.name for file in files) != [STATE, TENSORS]:
        raise ValueError
    if type(said["step"]) is not int or not all(type(file.size) is int for file in files):
        raise TypeError
    return Manifest(said["step"], str(said["oomph"]), str(said["torch"]), files)


def _crc32(said: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())
