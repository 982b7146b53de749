"""Tensors in one file, as safetensors lays them out: eight bytes, a JSON header, then plain memory.

Written here rather than by its library because that gathers the whole file in memory first; this goes tensor
by tensor and counts the checksum on the way. Any safetensors reader opens the result.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STORABLE: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
}
_DTYPES = {name: dtype for dtype, name in STORABLE.items()}
_LARGEST_HEADER = 100_000_000  # bytes, the limit of safetensors' own reader
PIECE = 16 << 20  # bytes written and counted at a time


class Malformed(Exception):
    """A file is not what it should be; the message completes "the file ..."."""


@dataclass(frozen=True)
class FileRecord:
    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: bytes `start` to `stop` of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class CheckedFile:
    """A new file, with its size and checksum; on disk when closed without error."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self.crc32 = path, 0, 0
        self.raw = FileIO(path, "x")

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), PIECE):
            piece = view[start : start + PIECE]
            self.crc32 = zlib.crc32(piece, self.crc32)
            while len(piece):  # a write may stop short, at 2 GiB or at the end of a quota
                written = self.raw.write(piece)
                self.size += written
                piece = piece[written:]

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        try:
            if kind is None:
                os.fsync(self.raw.fileno())
        finally:
            self.raw.close()

    @property
    def record(self) -> FileRecord:
        return FileRecord(self.path.name, self.size, self.crc32)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """A new file of `tensors`, from any device, one tensor in host memory at a time."""
    header, order = header_of(tensors, metadata)
    with CheckedFile(path) as file:
        file.write(header)
        for name in order:
            on_host = tensors[name].detach().cpu().contiguous()
            file.write(memory_of(on_host))
    return file.record


def write_bytes(path: Path, data: bytes) -> FileRecord:
    with CheckedFile(path) as file:
        file.write(data)
    return file.record


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The bytes before the data, and the order of the data: widest numbers first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name in order:
        tensor = tensors[name]
        size = tensor.numel() * tensor.dtype.itemsize
        entries[name] = {
            "dtype": STORABLE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def read_header(path: Path) -> dict[str, Entry]:
    """What the file holds and where. Checked: nothing beyond its end, no gaps, no overlaps."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LARGEST_HEADER, size - 8):
            raise Malformed("does not begin with a header of safetensors")
        try:
            entries = json.loads(file.read(length))
            return _checked(entries, 8 + length, size)
        except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
            raise Malformed("has a header that is not one of safetensors") from None


def _checked(entries: dict[str, Any], begin: int, end: int) -> dict[str, Entry]:
    found = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, stop = (begin + offset for offset in entry["data_offsets"])
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError
        if stop - start != prod(shape) * dtype.itemsize:
            raise ValueError
        found[name] = Entry(dtype, shape, start, stop)
    for entry in sorted(found.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != begin:
            raise ValueError
        begin = entry.stop
    if begin != end:
        raise ValueError
    return found


def read_into(file: FileIO, entry: Entry, target: Tensor) -> None:
    """Fill `target`, of any device and layout, with the entry's numbers."""
    direct = target.device.type == "cpu" and target.is_contiguous()
    memory = target if direct else torch.empty(entry.shape, dtype=entry.dtype)
    view = memory_of(memory)
    file.seek(entry.start)
    position = 0
    while position < len(view):
        got = file.readinto(view[position : position + PIECE])
        if not got:
            raise Malformed("ends too early")
        position += got
    if not direct:
        target.copy_(memory)


def checksum(path: Path) -> int:
    crc32 = 0
    with FileIO(path) as file:
        for piece in _pieces(file):
            crc32 = zlib.crc32(piece, crc32)
    return crc32


def _pieces(file: FileIO) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(PIECE))
    while got := file.readinto(buffer):
        yield buffer[:got]


def memory_of(tensor: Tensor) -> memoryview:
    """The very memory of a contiguous tensor of the host, of any dtype; needs no numpy."""
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    size = tensor.numel() * tensor.dtype.itemsize
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
