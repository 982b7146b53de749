"""Python's file functions, redirected to the overlay of a predicted program.

They are replaced (`open`, `os.*`, and with them pathlib, shutil, tempfile, numpy, logging, ...) in all
modules, also in those that have imported them by name. What is not redirected, such as a C library that
opens a file by itself, is refused: by the kernel if it can, and by an audit hook for Python's own functions.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import io
import os
import posixpath
import re
import socket
import stat
import sys
import zlib
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any

from oomph.prediction import overlay as overlays
from oomph.prediction.builtin_functions import as_builtin
from oomph.prediction.overlay import (
    ENTRIES,
    METADATA,
    READS,
    REAL,
    WRITE_FLAGS,
    Overlay,
    continue_with,
    copy_content,
    flags_of,
    identity,
    open_files,
)

_LONGEST_SOCKET_PATH = 107


def install(scratch: str) -> Overlay:
    """Redirect this process' file functions to an overlay in `scratch`, for good."""
    overlay = overlays.installed = Overlay(scratch)
    own: dict[str, Callable[..., Any]] = {
        name: getattr(overlay, name) for name in ENTRIES if hasattr(overlay, name)
    }
    own |= {"unlink": overlay.remove, "replace": overlay.rename}
    own |= {name: overlay.reading(name) for name in READS if hasattr(REAL, name)}
    own |= {name: overlay.changing(name) for name in METADATA if hasattr(REAL, name)}
    own |= dict.fromkeys(("setxattr", "removexattr"), overlay.without_attributes)
    replaced: dict[Any, Any] = {
        getattr(REAL, name): as_builtin(function, getattr(REAL, name))
        for name, function in own.items()
        if hasattr(REAL, name)
    }
    replaced[REAL.io_open] = as_builtin(overlay.io_open, REAL.io_open)
    replaced[REAL.open_code] = as_builtin(overlay.open_code, REAL.open_code)
    for supported in (
        os.supports_follow_symlinks,
        os.supports_fd,
        os.supports_dir_fd,
        os.supports_effective_ids,
    ):
        known = {replaced.get(each, each) for each in supported}
        supported.clear()
        supported |= known
    _divert_open_files(overlay)
    _replace_everywhere(replaced)
    _redirect_file_io(overlay)
    _redirect_imports(overlay)
    _redirect_databases(overlay)
    _redirect_shared_memory(overlay)
    _redirect_sockets(overlay)
    return overlay


def _redirect_file_io(overlay: Overlay) -> None:
    real: Any = REAL.FileIO

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real) if cls is FileIO else super().__instancecheck__(instance)

        def __subclasscheck__(cls, other: Any) -> bool:
            return issubclass(other, real) if cls is FileIO else super().__subclasscheck__(other)

    class FileIO(real, metaclass=Kind):  # type: ignore[misc]
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            if isinstance(file, int):
                return super().__init__(file, mode, closefd, opener)
            with overlay._opening(file):
                super().__init__(file, mode, closefd, opener or overlay._open_for_python)

    _name_as(FileIO, real)
    _name_as(Kind, type)
    io.FileIO = FileIO  # type: ignore[misc]


def _name_as(made: type, like: type) -> None:
    made.__module__, made.__name__, made.__qualname__ = like.__module__, like.__name__, like.__qualname__


def _redirect_imports(overlay: Overlay) -> None:
    """A program can import modules that it wrote; compiled files of modules are not written."""
    bootstrap: Any = sys.modules["_frozen_importlib_external"]
    reads = {"stat": os.stat, "listdir": os.listdir, "getcwd": os.getcwd}
    bootstrap._os = SimpleNamespace(**vars(bootstrap._os) | reads)
    bootstrap._io = SimpleNamespace(**vars(bootstrap._io) | {"open_code": overlay.open_code})


def _redirect_databases(overlay: Overlay) -> None:
    """SQLite opens files in C."""
    if "sqlite3" not in sys.modules:  # find_patched_references imports it
        return
    sqlite = sys.modules["sqlite3"]
    real: Any = sqlite.Connection
    attach = re.compile(r"(\s*attach\s+(?:database\s+)?)'((?:[^']|'')*)'", re.IGNORECASE)

    class Redirected:
        """Of SQL, only the path of an ATTACH is read."""

        def _with_paths(self, sql: Any, parameters: Any) -> tuple[Any, Any]:
            if not isinstance(sql, str) or sql.lstrip()[:6].lower() != "attach":
                return sql, parameters
            if found := attach.match(sql):
                path = overlay.database(found[2].replace("''", "'"), True).replace("'", "''")
                return f"{found[1]}'{path}'{sql[found.end() :]}", parameters
            if isinstance(parameters, (tuple, list)) and parameters:
                return sql, (overlay.database(parameters[0], True), *parameters[1:])
            return sql, parameters

        def execute(self, sql: Any, parameters: Any = ()) -> Any:
            sql, parameters = self._with_paths(sql, parameters)
            return super().execute(sql, parameters)  # type: ignore[misc]

    class Cursor(Redirected, sqlite.Cursor):  # type: ignore[misc, name-defined]
        pass

    def redirected(database: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return overlay.database(database, kwargs.get("uri", args[6] if len(args) > 6 else False))

    class Connection(Redirected, real):  # type: ignore[misc]
        def __init__(self, database: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(redirected(database, args, kwargs), *args, **kwargs)

        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        factory = kwargs.pop("factory", args[4] if len(args) > 4 else Connection)
        if issubclass(factory, Connection):
            return factory(database, *args, **kwargs)
        made = factory(redirected(database, args, kwargs), *args, **kwargs)  # of a class made before
        _refuse_attaching(made, overlay)
        return made

    _name_as(Connection, real)
    _name_as(Cursor, sqlite.Cursor)
    for name in ("sqlite3", "sqlite3.dbapi2"):
        vars(sys.modules[name])["Connection"] = Connection
    _replace_everywhere({sqlite.connect: as_builtin(connect, sqlite.connect)})


def _refuse_attaching(connection: Any, overlay: Overlay) -> None:
    """Files that a database's own code opens, of a connection that was not redirected."""
    attached, denied = 24, 1  # SQLITE_ATTACH, SQLITE_DENY

    def authorize(action: int, path: str | None, *more: Any) -> int:
        outside = path and path != ":memory:" and not path.removeprefix("file:").startswith(overlay.root)
        return denied if action == attached and outside else 0

    connection.set_authorizer(authorize)


def _redirect_shared_memory(overlay: Overlay) -> None:
    """SharedMemory opens files of /dev/shm in C, and starts a process that removes them in the end."""
    with contextlib.suppress(ImportError):
        import _posixshmem  # type: ignore[import-not-found]
        from multiprocessing import resource_tracker

        def shm_open(path: str, flags: int, mode: int = 0o777) -> int:
            return overlay.open("/dev/shm" + path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

        _posixshmem.shm_open = shm_open
        _posixshmem.shm_unlink = lambda path: overlay.remove("/dev/shm" + path)
        for name in ("register", "unregister", "ensure_running"):
            setattr(resource_tracker, name, lambda *args: None)
            setattr(resource_tracker._resource_tracker, name, lambda *args: None)


def _redirect_sockets(overlay: Overlay) -> None:
    """Unix sockets are entries of folders, too: those that the program makes are in the overlay."""
    if not hasattr(socket, "AF_UNIX"):
        return

    def where(self: socket.socket, address: Any, new: bool = False) -> Any:
        text = os.fsencode(address) if isinstance(address, (str, bytes)) else b""
        if self.family != socket.AF_UNIX or not text or text.startswith(b"\0"):
            return address
        path = overlay.creating(address) if new else overlay.existing(address)
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            folder, name = posixpath.split(path)
            link = f"{overlay.sockets}/{zlib.crc32(os.fsencode(folder)):x}"
            with contextlib.suppress(FileExistsError):
                REAL.symlink(folder, link)
            path = f"{link}/{name}"
        return path

    def redirect(name: str) -> None:
        call = getattr(socket.socket, name)

        @functools.wraps(call)
        def redirected(self: socket.socket, *args: Any) -> Any:  # the address is the last one
            return call(self, *args[:-1], *(where(self, each, name == "bind") for each in args[-1:]))

        setattr(socket.socket, name, redirected)

    for name in ("bind", "connect", "connect_ex", "sendto"):
        redirect(name)


_holders: list[Any] = []  # dicts, and functions with defaults, that hold what is replaced
_reference_counts: tuple[int, ...] = ()


def find_patched_references() -> None:
    """Before a fork, in the parent. Looks through all objects if the functions have new references."""
    global _reference_counts
    originals = [each for each in vars(REAL).values() if each is not REAL.FileIO]
    with contextlib.suppress(ImportError):  # Python can be built without it
        import sqlite3

        originals.append(sqlite3.connect)
    counts = tuple(map(sys.getrefcount, originals))
    if counts == _reference_counts:
        return
    _reference_counts = counts
    _holders.clear()
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # frozen objects are not listed
    found = gc.get_referrers(*originals)
    functions = gc.get_referrers(*(each for each in found if isinstance(each, tuple)))
    if frozen:
        gc.freeze()
    _holders.extend(each for each in functions if isinstance(each, FunctionType) and each.__defaults__)
    dicts = (each for each in found if isinstance(each, dict) and each is not vars(REAL))
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


def _divert_open_files(overlay: Overlay) -> None:
    """Files that were opened for writing before: this process continues with copies, of memory with the right
    to read it. What the program prints is the caller's, also where that goes to a file."""
    printed_to = set[tuple[int, int]]()
    for fd in range(3):
        with contextlib.suppress(OSError):
            printed_to.add(identity(REAL.fstat(fd)))
    with overlay._changing():
        for fd, path in open_files():
            with contextlib.suppress(OSError):
                flags, found = flags_of(fd), REAL.fstat(fd)
                is_file = stat.S_ISREG(found.st_mode) and identity(found) not in printed_to
                is_ours = path.startswith(overlay.root.removesuffix("/files"))
                if flags & os.O_ACCMODE == os.O_RDONLY or not is_file or is_ours:
                    continue
                where = f"/proc/self/fd/{fd}"
                if path.startswith(("/dev/shm/", "/memfd:")):
                    flags = flags & ~os.O_ACCMODE | os.O_RDONLY
                elif path.endswith(" (deleted)"):
                    copy = posixpath.join(posixpath.dirname(overlay.root), f"deleted{fd}")
                    os.close(REAL.open(copy, os.O_CREAT | os.O_WRONLY, 0o600))
                    copy_content(where, copy)
                    where = copy
                else:
                    place = overlay.locate(path)
                    overlay._raise(place)
                    overlay._fill(place)
                    where = overlay.where(place)
                continue_with(fd, where, flags)
    overlay._used = overlay._used and len(overlay._origins) > 1


# What is not redirected is refused ----------------------------------------------------------------------

# Audit event -> its arguments that are paths which it changes, and the descriptors of their folders.
_CHANGED_PATHS: dict[str, tuple[tuple[int, int | None], ...]] = {
    **dict.fromkeys(("os.remove", "os.rmdir"), ((0, 1),)),
    **dict.fromkeys(("os.mkdir", "os.chmod"), ((0, 2),)),
    **dict.fromkeys(("os.chown", "os.utime"), ((0, 3),)),
    **dict.fromkeys(("os.truncate", "os.setxattr", "os.removexattr", "sqlite3.connect"), ((0, None),)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.rename": ((0, 2), (1, 3)),
}
AUDITED_WRITES = frozenset({"open", *_CHANGED_PATHS})


def refuse_other_writes(overlay: Overlay, event: str, args: tuple[Any, ...]) -> None:
    """For an audit hook: such as posix.unlink."""
    if event == "open" and overlay.is_opening(args[0]):
        return
    if event != "open" and overlay.scratch_fd in args[1:]:
        return
    refuse_write(event, args, (posixpath.dirname(overlay.root) + "/",))


def refuse_write(event: str, args: tuple[Any, ...], folders: tuple[str, ...]) -> None:
    """Raise for an audit event that changes a file outside `folders`."""
    changed = _CHANGED_PATHS.get(event, ())
    if event == "open" and (args[2] or 0) & WRITE_FLAGS:
        changed = ((0, None),)
    for index, folder in changed:
        given = args[index]
        if isinstance(given, int) and event in ("open", "os.truncate"):
            continue  # a descriptor that was opened for it
        text = os.fsdecode(given) if isinstance(given, (str, bytes)) else ""
        if event == "sqlite3.connect":
            text = text.removeprefix("file:")
            if text in ("", ":memory:") or "mode=memory" in text:
                continue
        in_current = folder is None or args[folder] == -1
        full = text if text.startswith("/") else posixpath.join(REAL.getcwd(), text) if in_current else ""
        if full.startswith(folders) or (event == "open" and _is_no_file(full)):
            continue
        raise PermissionError(errno.EPERM, "a predicted program cannot change files", text or given)


def _is_no_file(path: str) -> bool:
    """A device, or what the kernel tells of this process."""
    if path.startswith("/proc/"):
        return path.startswith(("/proc/self/", "/proc/thread-self/", f"/proc/{os.getpid()}/"))
    if not path.startswith("/dev/"):
        return False
    try:
        return not stat.S_ISREG(REAL.stat(path).st_mode)
    except FileNotFoundError:
        return True
