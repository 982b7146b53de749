"""The files of a predicted program: a copy-on-write view of the file system, so that it changes none.

The program sees its own writes, deletions and renames: they go to a scratch folder that is deleted with the
process. Python's file functions are redirected there (`open`, `os.*`, and with them pathlib, shutil,
tempfile, numpy, logging, ...). What is not redirected, such as a C library that opens a file by itself, is
refused: by the kernel if it has Landlock (Linux 5.13), and by an audit hook for Python's own functions.

Installed in a child process that ends with the program (isolation.py); nothing is ever uninstalled.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import functools
import gc
import importlib.util
import io
import json
import os
import pickle
import posixpath
import shutil
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

import torch

from oomph import torch_internals as internals
from oomph.prediction.tracer.fake_cuda import Patches
from oomph.torch_internals import FakeTensor, storage_id

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MAX_LINKS = 40  # as the kernel


class FileOverlay:
    """Maps paths to where their current content is: the scratch folder, or the real file system."""

    def __init__(self, scratch: str) -> None:
        self.scratch = os.path.realpath(scratch)
        self.used = False  # until the first write, reads go straight through
        self.deleted: set[str] = set()  # real paths that the program removed, with all that is below them
        self._folders: dict[str, str] = {}  # links resolved, until the program makes or removes one
        self._cwd: str | None = None  # where it differs from the process': a folder that exists here alone
        self._direct = threading.local()

    # Paths ------------------------------------------------------------------------------------------------

    def absolute(self, path: Any, dir_fd: int | None = None) -> str:
        """An absolute path as the program means it, symbolic links of its folder resolved."""
        text = os.fsdecode(path)
        if not text:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not text.startswith("/"):
            folder = None if dir_fd is None else self.of_scratch(_REAL.readlink(f"/proc/self/fd/{dir_fd}"))
            text = posixpath.join(folder or self.cwd(), text)
        folder, name = posixpath.split(self.of_scratch(text.rstrip("/") or "/"))
        if name in ("", ".", ".."):
            return self._resolved(posixpath.join(folder, name))
        return posixpath.join(self._resolved(folder), name)

    def _resolved(self, folder: str) -> str:
        """Links followed from the root on, also those that the program made."""
        if folder in self._folders:
            return self._folders[folder]
        path = "/"
        for part in folder.split("/"):
            if part == "..":
                path = posixpath.dirname(path)
            elif part not in ("", "."):
                path = self.of_scratch(self.find(posixpath.join(path, part)))
        if not path.startswith("/proc"):  # whose links differ between processes
            self._folders[folder] = path
        return path

    def of_scratch(self, path: str) -> str:
        """The path that the program knows for one in the scratch folder."""
        if path == self.scratch or path.startswith(self.scratch + "/"):
            return path[len(self.scratch) :] or "/"
        return path

    def cwd(self) -> str:
        return self._cwd or _REAL.getcwd()

    def is_deleted(self, path: str) -> bool:
        while self.deleted and path != "/":
            if path in self.deleted:
                return True
            path = posixpath.dirname(path)
        return False

    def find(self, path: str, follow: bool = True) -> str:
        """Where the content of `path` is; where there is none, a path that does not exist."""
        for _ in range(_MAX_LINKS):
            here = self.scratch + path
            there = here if _exists(here) else path
            if there is path and self.is_deleted(path):
                return here
            if not follow or not _is_link(there):
                return there
            target = posixpath.join(posixpath.dirname(path), _REAL.readlink(there))
            path = self.absolute(posixpath.normpath(target))
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)

    def for_writing(self, path: str, *, keep: bool, create: bool = True) -> str:
        """Where to write `path`: a copy in the scratch folder, with the content if `keep`."""
        self.used = True
        there = self.find(path)
        if there.startswith(self.scratch + "/") and _exists(there):
            return there
        path = self.of_scratch(there)
        if not there.startswith(self.scratch + "/") and _exists(there):
            mode = _REAL.stat(there).st_mode
            if not stat.S_ISREG(mode):
                return there  # a device, a pipe; folders give their own error
            if not _REAL.access(there, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        elif not create:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        here = self._with_folder(path)
        if keep and there != here and _exists(there):
            with self.direct():
                shutil.copy2(there, here)
        return here

    def _with_folder(self, path: str) -> str:
        """The path in the scratch folder, its parents made; an error where the program has no such folder."""
        folder = posixpath.dirname(path)
        there = self.find(folder)
        if not _exists(there):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not stat.S_ISDIR(_REAL.stat(there).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if not there.startswith(self.scratch + "/") and not _REAL.access(there, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        with self.direct():
            os.makedirs(self.scratch + folder, exist_ok=True)
        return self.scratch + path

    def names(self, folder: str) -> list[str]:
        """What is in a folder, as the program left it."""
        folder = self.of_scratch(self.find(folder))
        here = self.scratch + folder
        found: dict[str, None] = {}
        listed = False
        if not self.is_deleted(folder):
            with contextlib.suppress(FileNotFoundError):
                present = (n for n in _REAL.listdir(folder) if posixpath.join(folder, n) not in self.deleted)
                found = dict.fromkeys(present)
                listed = True
        if _exists(here):
            found |= dict.fromkeys(_REAL.listdir(here))
            listed = True
        if not listed:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
        return list(found)

    @contextlib.contextmanager
    def direct(self) -> Iterator[None]:
        """Python's functions as they are, for this thread."""
        before = getattr(self._direct, "on", False)
        self._direct.on = True
        try:
            yield
        finally:
            self._direct.on = before

    @property
    def is_direct(self) -> bool:
        return getattr(self._direct, "on", False)

    # The operations ---------------------------------------------------------------------------------------

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self._passes(file):
            return _REAL.io_open(file, mode, *args, **kwargs)
        if kwargs.get("opener") is not None or (len(args) > 5 and args[5] is not None):
            self._direct.opener = True  # it opens the file itself, with the functions that are redirected
            try:
                return _REAL.io_open(file, mode, *args, **kwargs)
            finally:
                self._direct.opener = False
        path = self.absolute(file)
        writes = any(letter in mode for letter in "wax+")
        if not writes:
            where = self.find(path) if self.used else file
        elif "x" in mode and _exists(self.find(path, follow=False)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), file)
        else:
            where = self.for_writing(path, keep="w" not in mode and "x" not in mode, create="r" not in mode)
        with _named(file):
            opened = _REAL.io_open(where, mode, *args, **kwargs)
        return _with_name(opened, file) if writes else opened

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if self._passes(path):
            return _REAL.open(path, flags, mode, dir_fd=dir_fd)
        full = self.absolute(path, dir_fd)
        if not flags & _WRITE_FLAGS:
            where = self.find(full)
        elif flags & os.O_CREAT and flags & os.O_EXCL and _exists(self.find(full, follow=False)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        elif flags & getattr(os, "O_TMPFILE", 0) == getattr(os, "O_TMPFILE", -1):
            where = self._with_folder(posixpath.join(full, "unnamed")).removesuffix("/unnamed")
        else:
            where = self.for_writing(full, keep=not flags & os.O_TRUNC, create=bool(flags & os.O_CREAT))
            flags |= os.O_CREAT  # it is there, but its copy may not be
        with _named(path):
            return _REAL.open(where, flags, mode)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        full = self.absolute(path, dir_fd)
        there = self._existing(full, path)
        if stat.S_ISDIR(_REAL.lstat(there).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._forget(full)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        full = self.absolute(path, dir_fd)
        there = self._existing(full, path)
        if not stat.S_ISDIR(_REAL.lstat(there).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self.names(full):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._forget(full)

    def _forget(self, full: str) -> None:
        """Remove a path from the program's view."""
        self.used = True
        here = self.scratch + full
        if _exists(here):
            with self.direct():
                shutil.rmtree(here) if stat.S_ISDIR(_REAL.lstat(here).st_mode) else _REAL.unlink(here)
        if _exists(full):
            self.deleted.add(full)
        self._folders.clear()

    def _existing(self, full: str, path: Any) -> str:
        there = self.find(full, follow=False)
        if not _exists(there):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return there

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        source, target = self.absolute(src, src_dir_fd), self.absolute(dst, dst_dir_fd)
        there = self._existing(source, src)
        self.used = True
        if source == target:
            return
        old = self.find(target, follow=False)
        if _exists(old) and stat.S_ISDIR(_REAL.lstat(old).st_mode):
            if not stat.S_ISDIR(_REAL.lstat(there).st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), src, None, dst)
            if self.names(target):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), src, None, dst)
        here = self._with_folder(target)
        if _exists(old):
            self._forget(target)
        self._copy(source, here)
        self._forget(source)

    def _copy(self, source: str, here: str) -> None:
        """What the program sees at `source`, with all below it, to a path in the scratch folder."""
        there = self.find(source, follow=False)
        if stat.S_ISDIR(_REAL.lstat(there).st_mode):
            _REAL.mkdir(here)
            for name in self.names(source):
                self._copy(posixpath.join(source, name), posixpath.join(here, name))
        elif there.startswith(self.scratch + "/"):
            _REAL.rename(there, here)
        else:
            with self.direct():
                shutil.copy2(there, here, follow_symlinks=False)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        full = self.absolute(path, dir_fd)
        if _exists(self.find(full, follow=False)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.used = True
        with _named(path):
            _REAL.mkdir(self._with_folder(full), mode)

    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        source, target = self.absolute(src), self.absolute(dst)
        self._existing(source, src)
        if _exists(self.find(target, follow=False)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
        self.used = True
        with self.direct():
            shutil.copy2(self.find(source), self._with_folder(target))

    def symlink(self, src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        full = self.absolute(dst, dir_fd)
        if _exists(self.find(full, follow=False)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), src, None, dst)
        self.used = True
        _REAL.symlink(src, self._with_folder(full))
        self._folders.clear()

    def listdir(self, path: Any = ".") -> Any:
        if path is None or not self.used or self._passes(path):
            return _REAL.listdir("." if path is None else path)
        names = self.names(self.absolute(path))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        if path is None or not self.used or self._passes(path):
            return _REAL.scandir("." if path is None else path)
        full = self.absolute(path)
        entries = [_Entry(self, os.fspath(path), full, name) for name in self.names(full)]
        return _Entries(entries)

    def chdir(self, path: Any) -> None:
        if self._passes(path):
            _REAL.chdir(path)
            self._cwd = None
            return
        full = self.absolute(path)
        there = self.find(full)
        with _named(path):
            _REAL.chdir(there)
        self._cwd = self.of_scratch(there) if there.startswith(self.scratch + "/") else None

    def _passes(self, path: Any) -> bool:
        return self.is_direct or isinstance(path, int)


class _Entries(contextlib.AbstractContextManager["_Entries"]):
    """What os.scandir returns: an iterator that can be closed."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __exit__(self, *error: Any) -> None:
        pass

    close = __exit__


class _Entry:
    """os.DirEntry, which cannot be made."""

    def __init__(self, overlay: FileOverlay, folder: Any, full: str, name: str) -> None:
        self._overlay, self._full = overlay, posixpath.join(full, name)
        self.name = os.fsencode(name) if isinstance(folder, bytes) else name
        self.path = posixpath.join(folder, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return _REAL.stat(self._overlay.find(self._full, follow_symlinks), follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


class _Real:
    """Python's own functions, kept before they are replaced."""

    def __init__(self) -> None:
        self.io_open = io.open
        for name in (*_READS, *_CHANGES, *_OWN):
            if hasattr(os, name):
                setattr(self, name, getattr(os, name))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


# Functions of os whose first argument is a path that they read / change in place.
_READS = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf")
_CHANGES = ("truncate", "chmod", "chown", "utime", "setxattr", "removexattr")
_OWN = (
    *("open", "remove", "unlink", "rmdir", "rename", "replace", "mkdir", "link", "symlink"),
    *("listdir", "scandir", "chdir", "getcwd"),
)
_REAL = _Real()


def _exists(path: str) -> bool:
    try:
        _REAL.lstat(path)
    except (OSError, ValueError):
        return False
    return True


def _is_link(path: str) -> bool:
    try:
        return stat.S_ISLNK(_REAL.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _named(path: Any) -> Iterator[None]:
    """Errors name the path that the program gave."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            error.filename = path
        raise


def _with_name(opened: Any, file: Any) -> Any:
    """`file.name` is the path that the program gave."""
    raw = opened
    while (inner := getattr(raw, "buffer", None) or getattr(raw, "raw", None)) is not None:
        raw = inner
    with contextlib.suppress(AttributeError):
        raw.name = file
    return opened


def install(scratch: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Redirect this process' file functions to an overlay in `scratch`, for good.

    The result refuses other writes: for a hook of AUDITED_WRITES.
    """
    overlay = FileOverlay(scratch)
    replaced: dict[Any, Any] = {builtins.open: overlay.open, os.open: overlay.os_open}
    for name in ("remove", "rmdir", "rename", "mkdir", "link", "symlink", "listdir", "scandir", "chdir"):
        replaced[getattr(os, name)] = _unless_direct(overlay, name)
    replaced[os.unlink] = replaced[os.remove]
    replaced[os.replace] = replaced[os.rename]
    replaced[os.getcwd] = overlay.cwd
    for name in _READS:
        if hasattr(os, name):
            replaced[getattr(os, name)] = _reading(overlay, name)
    for name in _CHANGES:
        if hasattr(os, name):
            replaced[getattr(os, name)] = _changing(overlay, name)
    if "sqlite3" in sys.modules:  # find_patched_references imports it
        connect = sys.modules["sqlite3"].connect
        replaced[connect] = _connecting(overlay, connect)
    for supported in (os.supports_follow_symlinks, os.supports_fd, os.supports_effective_ids):
        supported |= {new for old, new in replaced.items() if old in supported}
    _replace_everywhere(replaced)
    _redirect_imports(overlay)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # they name files by a folder's descriptor
    _divert_open_files(overlay)

    def refuse_other_writes(event: str, args: tuple[Any, ...]) -> None:  # such as posix.unlink
        if not getattr(overlay._direct, "opener", False):
            refuse_write(event, args, (overlay.scratch,))

    return refuse_other_writes


def _redirect_imports(overlay: FileOverlay) -> None:
    """A program can import modules that it wrote; compiled files of modules are not written."""
    bootstrap: Any = sys.modules["_frozen_importlib_external"]
    reads = {"stat": os.stat, "listdir": os.listdir, "getcwd": os.getcwd}
    bootstrap._os = SimpleNamespace(**vars(bootstrap._os) | reads)
    opened = {"open_code": lambda path: overlay.open(path, "rb")}
    bootstrap._io = SimpleNamespace(**vars(bootstrap._io) | opened)


def _unless_direct(overlay: FileOverlay, name: str) -> Callable[..., Any]:
    real, own = getattr(_REAL, name), getattr(overlay, name)

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) if overlay.is_direct else own(*args, **kwargs)

    return call


def _reading(overlay: FileOverlay, name: str) -> Callable[..., Any]:
    real = getattr(_REAL, name)

    @functools.wraps(real)
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if overlay.is_direct or not overlay.used or isinstance(path, int):
            return real(path, *args, **kwargs)
        follow = name not in ("lstat", "readlink") and kwargs.get("follow_symlinks", True)
        where = overlay.find(overlay.absolute(path, kwargs.pop("dir_fd", None)), follow)
        with _named(path):
            return real(where, *args, **kwargs)

    return call


def _changing(overlay: FileOverlay, name: str) -> Callable[..., Any]:
    real = getattr(_REAL, name)

    @functools.wraps(real)
    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if overlay.is_direct:
            return real(path, *args, **kwargs)
        if isinstance(path, int):
            return (
                real(path, *args, **kwargs) if name == "truncate" else None
            )  # modes and times do not matter
        full = overlay.absolute(path, kwargs.pop("dir_fd", None))
        overlay._existing(full, path)
        there = overlay.find(full)
        if stat.S_ISDIR(_REAL.stat(there).st_mode) and not there.startswith(overlay.scratch + "/"):
            return None  # of a folder only its entries matter
        with _named(path):
            return real(overlay.for_writing(full, keep=True, create=False), *args, **kwargs)

    return call


def _connecting(overlay: FileOverlay, connect: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(connect)
    def call(database: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("uri") or str(database) in ("", ":memory:"):
            return connect(database, *args, **kwargs)
        return connect(overlay.for_writing(overlay.absolute(database), keep=True), *args, **kwargs)

    return call


_holders: list[Any] = []  # dicts, and functions with defaults, that hold what is replaced
_reference_counts: tuple[int, ...] = ()


def find_patched_references() -> None:
    """Before a fork, in the parent. Looks through all objects if the functions have new references."""
    global _reference_counts
    originals = [*vars(_REAL).values()]
    with contextlib.suppress(ImportError):  # Python can be built without it
        import sqlite3

        originals.append(sqlite3.connect)
    counts = tuple(map(sys.getrefcount, originals))
    if counts == _reference_counts:
        return
    _reference_counts = counts
    _holders.clear()
    kept = (vars(_REAL), vars(sys.modules["posix"]), vars(sys.modules["_io"]))
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # frozen objects are not listed
    found = gc.get_referrers(*originals)
    functions = gc.get_referrers(*(each for each in found if isinstance(each, tuple)))
    if frozen:
        gc.freeze()
    _holders.extend(each for each in functions if isinstance(each, FunctionType) and each.__defaults__)
    dicts = (each for each in found if isinstance(each, dict) and not any(each is one for one in kept))
    _holders.extend(filter(_is_of_code, dicts))


def _is_of_code(holder: dict[Any, Any]) -> bool:
    """A namespace or a table of functions. The attributes of an object are not: they would be kept alive."""
    namespace = holder.keys() & {"__builtins__", "__module__", "__name__"}
    return bool(namespace) or all(map(callable, holder.values()))


def _replace_everywhere(replaced: dict[Any, Any]) -> None:
    """Put the replacements where the originals are: in modules that imported them, in default arguments."""

    def new(value: Any) -> Any:
        return replaced.get(value, value) if isinstance(value, BuiltinFunctionType) else value

    for holder in _holders:
        if isinstance(holder, dict):
            holder.update({name: new(value) for name, value in holder.items() if new(value) is not value})
        elif holder.__defaults__:
            holder.__defaults__ = tuple(map(new, holder.__defaults__))


def _divert_open_files(overlay: FileOverlay) -> None:
    """Files that were opened for writing before: this process continues with copies."""
    import fcntl

    with contextlib.suppress(OSError):
        for entry in _REAL.listdir("/proc/self/fd"):
            fd = int(entry)
            with contextlib.suppress(OSError):
                if fd <= 2 or not stat.S_ISREG(os.fstat(fd).st_mode):
                    continue
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if flags & os.O_ACCMODE == os.O_RDONLY:
                    continue
                path = _REAL.readlink(f"/proc/self/fd/{fd}")
                if path.endswith(" (deleted)") or not _exists(path) or path.startswith("/dev/shm/"):
                    continue
                where = overlay.for_writing(path, keep=True)
                copy = _REAL.open(where, flags & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
                os.lseek(copy, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(copy, fd, os.get_inheritable(fd))
                os.close(copy)


# What is not redirected is refused ------------------------------------------------------------------

_CHANGED_PATHS = {  # audit event -> which of its arguments are paths that it changes
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate"), (0,)),
    **dict.fromkeys(("os.chmod", "os.chown", "os.utime"), (0,)),
    **dict.fromkeys(("os.link", "os.symlink"), (1,)),
    "os.rename": (0, 1),
}
AUDITED_WRITES = frozenset({"open", *_CHANGED_PATHS})


def refuse_write(event: str, args: tuple[Any, ...], folders: tuple[str, ...]) -> None:
    """Raise for an audit event that changes a file outside `folders`."""
    changed: tuple[int, ...] = _CHANGED_PATHS.get(event, ())
    if event == "open" and (args[2] or 0) & _WRITE_FLAGS:
        changed = (0,)
    for index in changed:
        if isinstance(args[index], (str, bytes)):
            text = os.fsdecode(args[index])
            full = text if text.startswith("/") else posixpath.join(_REAL.getcwd(), text)
            if not full.startswith((*folders, "/dev/", "/proc/")):
                raise PermissionError(errno.EPERM, "a predicted program cannot change files", text)


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_NO_NEW_PRIVILEGES = 38  # of prctl
_FILE_ACCESS = {
    1: 0b1111111110010,
    2: 1 << 13,
    3: 1 << 14,
}  # rights by ABI version: write, remove, make; refer; truncate


def forbid_writes_outside(folders: tuple[str, ...]) -> bool:
    """Let the kernel refuse writes outside `folders`, also of programs that are started. False: it cannot."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    access = sum(rights for since, rights in _FILE_ACCESS.items() if version >= since)
    attribute = ctypes.c_uint64(access)
    ruleset = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(attribute), 8, 0)
    if ruleset < 0:
        return False

    class Rule(ctypes.Structure):
        _pack_ = 1
        _fields_ = (("access", ctypes.c_uint64), ("folder", ctypes.c_int32))

    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            fd = _REAL.open(folder, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
            rule = Rule(access, fd)
            libc.syscall(_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0)
            os.close(fd)
    failed = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
    return not failed


# --------------------------------------------------------------------------------------- tensors without data

# torch.save, pickle and safetensors write shapes instead of data, and read them back.
_SAVED = b"tensors of a prediction, without data\n"
_searched_modules: set[str] = set()
_with_safe_open: set[str] = set()
_map_location: ContextVar[Any] = ContextVar("map_location", default=None)


def install_saving(patches: Patches) -> None:
    """What a program saves, it can load again."""
    _tell_storages_apart(patches)
    _save_without_data(patches)
    _load_to_gpu(patches)
    _save_safetensors_without_data(patches)
    _map_written_arrow_files(patches)
    _save_tokenizers(patches)


def _tell_storages_apart(patches: Patches) -> None:
    """Libraries find tensors that share memory by its address, which is 0 for all fake ones."""
    address = torch.UntypedStorage.data_ptr

    def data_ptr(storage: torch.UntypedStorage) -> int:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
            if found := address(storage):  # some storages without data refuse the question, some warn
                return found
        return storage_id(storage)

    def of_tensor(tensor: FakeTensor) -> int:
        return data_ptr(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    patches.set(torch.UntypedStorage, "data_ptr", data_ptr)
    patches.set(FakeTensor, "data_ptr", of_tensor)


def _save_without_data(patches: Patches) -> None:
    """torch.save, and pickle, write shapes and dtypes instead of data; torch.load reads them back."""

    def reduce(tensor: FakeTensor, protocol: Any) -> Any:
        layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, str(tensor.device)
        return _tensor_without_data, (layout, tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))

    save_real, load_real = torch.save, torch.load

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):  # of a tensor with data, by pickle
            return save_real(obj, f, *args, **kwargs)
        data = _SAVED + pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
        if hasattr(f, "write"):
            f.write(data)
        else:
            Path(f).write_bytes(data)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext(f) if hasattr(f, "read") else open(f, "rb") as file:
            start = file.tell()
            saved = file.read() if file.read(len(_SAVED)) == _SAVED else None
            if saved is None:
                file.seek(start)
        if saved is None:  # or a tensor with values in a file that we have written
            where = _map_location.get() if map_location is None else map_location
            return load_real(f, where, *args, **kwargs)
        token = _map_location.set(map_location)
        try:
            return pickle.loads(saved)
        finally:
            _map_location.reset(token)

    patches.set(FakeTensor, "__reduce_ex__", reduce)
    patches.set(torch, "save", save)
    patches.set(torch, "load", load)


def _tensor_without_data(
    layout: tuple[Any, Any, torch.dtype, str], requires_grad: bool, is_parameter: bool
) -> torch.Tensor:
    shape, stride, dtype, device = layout
    where = _map_location.get()
    if isinstance(where, dict):
        where = where.get(device, device)
    if callable(where):  # such as lambda storage, location: storage.cuda()
        moved = where(torch.UntypedStorage(0, device="cpu"), device)
        where = None if moved is None else getattr(moved, "loaded_to", "cpu")
    where = device if where is None else where
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=where)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _load_to_gpu(patches: Patches) -> None:
    """torch.load moves the storages of a real file to the GPU, one by one, then makes tensors of them."""
    to = torch.UntypedStorage.to

    def to_device(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda":
            return to(storage, device=device, non_blocking=non_blocking)
        storage.loaded_to = device
        return storage  # torch reads the data of old files into it later

    def on_its_device(tensor: torch.Tensor) -> torch.Tensor:
        storage: Any = tensor.untyped_storage()
        if not hasattr(storage, "loaded_to"):
            return tensor
        if not hasattr(storage, "on_gpu"):  # allocated with the shape and dtype of its first tensor
            length = storage.nbytes() // tensor.element_size()
            whole = tensor if tensor.numel() == length else tensor.as_strided((length,), (1,), 0)
            storage.on_gpu = torch.empty_like(
                whole, device=storage.loaded_to, memory_format=torch.contiguous_format
            )
        layout = tensor.size(), tensor.stride(), tensor.storage_offset()
        view = storage.on_gpu.view(-1).view(tensor.dtype).as_strided(*layout)
        return view.detach().requires_grad_(tensor.requires_grad)

    patches.set(torch.UntypedStorage, "to", to_device)
    patches.set(*internals.REBUILT_TENSOR_DEVICE, on_its_device)


def find_users_of_safetensors() -> None:
    """Also before a fork, in the parent: to look at every module takes a child as long as a small trace."""
    new = sys.modules.keys() - _searched_modules | {"__main__"}  # where a notebook imports between traces
    _searched_modules.update(new)
    _with_safe_open.update(name for name in new if "safe_open" in getattr(sys.modules[name], "__dict__", ()))


def _save_safetensors_without_data(patches: Patches) -> None:
    """Replaces save_file's code: modules that imported it by name keep the function."""
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors
    from safetensors import torch as module

    open_real = safetensors.safe_open

    def open_written(filename: Any, *args: Any, **kwargs: Any) -> Any:
        """Its native code opens the path itself, where files that the program has written are not."""
        with open(filename, "rb") as file:
            return open_real(f"/dev/fd/{file.fileno()}", *args, **kwargs)

    find_users_of_safetensors()
    for user in map(sys.modules.get, _with_safe_open):
        if getattr(user, "safe_open", None) is open_real:
            patches.set(user, "safe_open", open_written)
    real: Any = module.save_file
    real.write = _write_safetensors
    patches.callback(functools.partial(setattr, real, "__code__", real.__code__))
    real.__code__ = _call_write.__code__


def _map_written_arrow_files(patches: Patches) -> None:
    """As for safetensors: datasets.load_dataset writes a file with Python's functions, then maps it."""

    def imported() -> None:
        import pyarrow

        map_real = pyarrow.memory_map

        def map_written(path: Any, mode: str = "r") -> Any:
            with open(path, "rb" if mode == "r" else "r+b") as file:
                return map_real(f"/dev/fd/{file.fileno()}", mode)

        patches.set(pyarrow, "memory_map", map_written)

    patches.when_imported("pyarrow", imported)


def _save_tokenizers(patches: Patches) -> None:
    """As for safetensors: native code writes and reads tokenizer.json."""

    def imported() -> None:
        from tokenizers import Tokenizer

        def save(tokenizer: Any, path: Any, pretty: bool = True) -> None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(tokenizer.to_str(pretty=pretty))

        def from_file(path: Any) -> Any:
            with open(path, encoding="utf-8") as file:
                return Tokenizer.from_str(file.read())

        patches.set(Tokenizer, "save", save)
        patches.set(Tokenizer, "from_file", staticmethod(from_file))

    patches.when_imported("tokenizers", imported)


def _call_write(tensors: Any, filename: Any, metadata: Any = None) -> None:
    """Runs in the namespace of safetensors.torch."""
    save_file.write(tensors, filename, metadata)  # type: ignore[name-defined]  # noqa: F821


def _write_safetensors(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any) -> None:
    """A valid file with a header and a hole of the tensors' size, which takes no space on disk."""
    names = {dtype: name for name, dtype in sys.modules["safetensors.torch"]._TYPES.items()}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        layout = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**layout, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
