"""Memory that a process shares with others: what is mapped of it, and copies in its place.

A forked child shares with its parent what was mapped with MAP_SHARED: np.memmap(mode="r+"), mmap, tensors
after share_memory_(), mp.Array, SharedMemory, torch.from_file(shared=True), and the semaphore of an mp.Lock.
A predicted program gets copies at the same addresses, so that the caller's stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from dataclasses import dataclass
from typing import Any

from oomph.units import MiB

_MAP_FIXED, _MREMAP_MAYMOVE, _MREMAP_FIXED = 0x10, 1, 2
_COPIED_AT_ONCE = 64 * MiB  # larger ones are copied by page, and not shared with processes of the program
_NOT_FILES = ("/dev/", "/sys/", "/proc/", "anon_inode:", "socket:", "[")
_MEMORY = ("/dev/zero", "/dev/shm/")


@dataclass(frozen=True)
class Mapping:
    start: int
    size: int
    protection: int
    offset: int
    inode: int
    path: str


def shared_mappings(writable: bool) -> list[Mapping]:
    """Of files and of memory of this process; none where the system does not list them."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/maps", errors="surrogateescape") as lines:
        for line in lines:
            addresses, flags, offset, _, inode, *path = line.rstrip("\n").split(None, 5)
            if flags[3] != "s" or (writable and flags[1] != "w") or not path:
                continue
            name = path[0]
            if name.startswith(_NOT_FILES) and not name.startswith(_MEMORY):
                continue
            start, end = (int(each, 16) for each in addresses.split("-"))
            protection = sum(
                bit
                for letter, bit in zip(flags, (mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC), strict=False)
                if letter != "-"
            )
            found.append(Mapping(start, end - start, protection, int(offset, 16), int(inode), name))
    return found


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def map_at(mapping: Mapping, fd: int, kind: int) -> None:
    """Map a file in place of a mapping."""
    where = mapping.start, mapping.size, mapping.protection, kind | _MAP_FIXED, fd, mapping.offset
    _checked(_libc().mmap(*where))


def make_private() -> None:
    """Give this process, and those that it forks, copies of the memory that it shares with others."""
    if not sys.platform.startswith("linux"):
        return
    for mapping in shared_mappings(writable=True):
        if mapping.size > _COPIED_AT_ONCE and (fd := _reopened(mapping)) is not None:
            try:
                map_at(mapping, fd, mmap.MAP_PRIVATE)
            finally:
                os.close(fd)
        else:
            _copy(mapping)


def _reopened(mapping: Mapping) -> int | None:
    """The file of a mapping, to read: by its path, or by a descriptor of it."""
    candidates = [mapping.path]
    with contextlib.suppress(OSError):
        candidates += [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    for path in candidates:
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == mapping.inode:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _copy(mapping: Mapping) -> None:
    libc = _libc()
    shared = mmap.MAP_SHARED if mapping.size <= _COPIED_AT_ONCE else mmap.MAP_PRIVATE
    flags = shared | mmap.MAP_ANONYMOUS
    new = _checked(libc.mmap(None, mapping.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0))
    view = memoryview((ctypes.c_char * mapping.size).from_address(new)).cast("B")
    memory, done = os.open("/proc/self/mem", os.O_RDONLY), 0
    try:
        with contextlib.suppress(OSError):  # behind the end of its file
            while done < mapping.size and (read := os.preadv(memory, [view[done:]], mapping.start + done)):
                done += read
    finally:
        os.close(memory)
    fixed = _MREMAP_MAYMOVE | _MREMAP_FIXED
    _checked(libc.mremap(new, mapping.size, mapping.size, fixed, mapping.start))
    libc.mprotect(mapping.start, mapping.size, mapping.protection)
