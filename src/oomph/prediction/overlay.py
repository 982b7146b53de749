"""The files of a predicted program: a copy-on-write view of the file system, so that it changes none.

The program sees its own writes, deletions and renames; they go to a scratch folder that is deleted with the
process. How they are kept:

- An entry of the file system that the program changes is first made in the scratch folder, at the same path
  and with the same attributes: a folder is empty there, a file has its size but takes no space. An `_Origin`,
  found by the inode number, says what it stands for: the rest of the folder, or the content of the file.
- What the program does is then done there by the kernel, which also decides how it fails. Because origins are
  found by inode, a renamed folder keeps what is below it, and both names of a hard link are one file.
- The content of a file is copied when it is first opened for writing. What the process had open or mapped of
  the original continues with the copy, so that readers see what is written.
- Origins are in a journal in the scratch folder, which processes that the program forks read and write too.

Python's file functions are redirected to it by redirection.py.

Considered instead. User and mount namespaces with the kernel's overlayfs redirect C libraries too, but most
containers refuse them, and a reader that was open does not see there what is written. A supervisor that
answers system calls (seccomp's notifications) would need this file's content as well, in another process, and
a switch of processes at each call. pyfakefs keeps its files in memory and replaces modules, which an earlier
`from os import replace` escapes (redirection.py looks for such references).

Installed in a child process that ends with the program (isolation.py); nothing is ever uninstalled.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import mmap
import os
import posixpath
import stat
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from oomph.prediction.shared_memory import map_at, shared_mappings

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = getattr(os, "O_TMPFILE", 0)
_OF_DESCRIPTORS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | getattr(os, "O_PATH", 0)
_MAX_LINKS = 40  # as the kernel
_OF_KERNEL = ("/proc/", "/sys/")  # not folders of files: never copied
_KEPT_FD = 400  # and above: descriptors of ours, away from those that programs close and count

# Functions of os: they read a path, make or change an entry of a folder, or change a file's metadata.
READS = ("stat", "lstat", "access", "readlink", "statvfs", "getxattr", "listxattr", "pathconf")
ENTRIES = (
    *(
        "open",
        "remove",
        "unlink",
        "rmdir",
        "rename",
        "replace",
        "mkdir",
        "mkfifo",
        "mknod",
        "link",
        "symlink",
    ),
    *("listdir", "scandir", "chdir", "fchdir", "getcwd", "getcwdb", "truncate", "fstat"),
)
METADATA = ("chmod", "fchmod", "chown", "fchown", "lchown", "utime", "setxattr", "removexattr")


class _Real:
    """Python's own functions, kept before they are replaced."""

    def __init__(self) -> None:
        self.io_open, self.open_code, self.FileIO = io.open, io.open_code, io.FileIO
        for name in (*READS, *ENTRIES, *METADATA):
            if hasattr(os, name):
                setattr(self, name, getattr(os, name))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


REAL = _Real()


@dataclass
class _Origin:
    """What an entry of the scratch folder stands for in the file system."""

    lower: str  # its path
    device: int
    inode: int
    links: int
    blocks: int
    owner: tuple[int, int]
    denied: bool  # the user may not write it
    changed: bool = False  # its metadata, which who reads the original would not see
    filled: bool = False  # a file's content is in the scratch folder
    taken: set[str] = field(default_factory=set)  # a folder's names that `lower` does not tell any more
    kept_name: bool = False  # of a file that has several
    counted: int = 0  # of its links: a folder's that were taken, a file's names that are above or removed


@dataclass
class _Place:
    """What the program means by a path."""

    path: str  # symbolic links of its folder, and if followed its own, resolved
    parent: _Place | None
    above: bool  # it is in the scratch folder
    lower: str | None  # where it is in the file system, also of one that is above
    stat: os.stat_result | None  # of where it is; None: nowhere
    rest: str = ""  # of the given path, which the kernel refuses: it begins at no folder
    links: int = 0  # that were followed

    @property
    def mode(self) -> int:
        return 0 if self.stat is None else self.stat.st_mode


def _error(number: int, *names: Any) -> OSError:
    if len(names) > 1:
        return OSError(number, os.strerror(number), names[0], None, names[1])
    return OSError(number, os.strerror(number), *names)


@contextlib.contextmanager
def _named(*paths: Any) -> Iterator[None]:
    """Errors name the paths that the program gave."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.filename2 is not None:
            names = [os.fspath(path) if isinstance(path, os.PathLike) else path for path in paths]
            error.filename = names[0]
            if len(names) > 1:
                error.filename2 = names[1]
        raise


class Overlay:
    """Maps paths to where their current content is: the scratch folder, or the real file system."""

    def __init__(self, scratch: str) -> None:
        self.root = posixpath.join(os.path.realpath(scratch), "files")
        self.sockets = self.root + "/.sockets"  # a folder whose paths are the same for C code
        self.linked = (
            posixpath.dirname(self.root) + "/linked"
        )  # copies of hard-linked files: a name that stays
        for folder in (self.root, self.sockets, self.linked):
            REAL.mkdir(folder)
        # Changes of metadata name files relative to it, by which a filter of system calls may know them.
        self.scratch_fd = self._keep_open(self.root, getattr(os, "O_PATH", 0))
        self._journal = self._keep_open(self.root + "/../journal", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._read, self._used = 0, False  # bytes of the journal
        self._device = REAL.stat(self.root).st_dev
        self._origins: dict[int, _Origin] = {}  # by inode
        self._removed: dict[tuple[int, int], int] = {}  # names of hard-linked files that are not above
        self._hard_linked: set[tuple[int, int]] = set()  # originals, of which one name at least is above
        self._folders: dict[str, _Place] = {}
        self._cwd_fd: int | None = None  # of the current folder, once it is above
        self._cwd = ""  # of the process, where that is a folder of the file system
        with contextlib.suppress(OSError):
            self._cwd = REAL.getcwd()
        self._lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: setattr(self, "_lock", threading.RLock()))
        self._thread = threading.local()  # .opening: what Python's open was called with
        with self._changing():
            self._record("made", REAL.lstat(self.root).st_ino, asdict(self._origin("/", REAL.stat("/"))))
        self._used = False

    @staticmethod
    def _keep_open(path: str, flags: int) -> int:
        import fcntl

        fd = REAL.open(path, flags)
        try:
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _KEPT_FD)
        except OSError:  # more than the process may have
            return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        finally:
            os.close(fd)

    # What is known, by all processes of the program -----------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        import fcntl

        with self._lock:
            fcntl.lockf(self._journal, fcntl.LOCK_EX)
            try:
                self._catch_up()
                self._used = True
                yield
            finally:
                fcntl.lockf(self._journal, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Read what other processes have written."""
        size = os.lseek(self._journal, 0, os.SEEK_END)
        if size > self._read:
            text = os.pread(self._journal, size - self._read, self._read)
            self._read += text.rfind(b"\n") + 1
            for line in text[: text.rfind(b"\n") + 1].splitlines():
                self._apply(*json.loads(line))
            self._used = True

    def _record(self, kind: str, *values: Any) -> None:
        line = json.dumps((kind, *values), default=sorted).encode() + b"\n"
        os.write(self._journal, line)
        self._read += len(line)
        self._apply(kind, *values)

    def _apply(self, kind: str, inode: int = 0, value: Any = None) -> None:
        if kind == "made":
            made = self._origins[inode] = _Origin(**value | {"taken": set(value["taken"])})
            if made.kept_name:
                self._hard_linked.add((made.device, made.inode))
        elif kind == "gone":
            self._origins.pop(inode, None)
        elif kind == "taken":
            name, is_folder = value
            self._origins[inode].taken.add(name)
            self._origins[inode].counted += is_folder
        elif kind == "removed":
            self._removed[inode, value] = self._removed.get((inode, value), 0) + 1
        elif kind == "set":
            vars(self._origins[inode]).update(value)
        if kind in ("made", "gone", "folders"):
            self._folders.clear()

    def is_used(self) -> bool:
        """Whether anything was changed: before, reads go straight through."""
        with self._lock:
            self._catch_up()
        return self._used

    def _origin(self, lower: str, found: os.stat_result) -> _Origin:
        denied = not stat.S_ISLNK(found.st_mode) and not REAL.access(lower, os.W_OK)
        return _Origin(
            lower, found.st_dev, found.st_ino, found.st_nlink, getattr(found, "st_blocks", 0),
            (found.st_uid, found.st_gid), denied,
        )  # fmt: skip

    def _origin_of(self, place: _Place) -> _Origin | None:
        return self._origins.get(place.stat.st_ino) if place.above and place.stat is not None else None

    # Paths ----------------------------------------------------------------------------------------------

    def known_as(self, path: str) -> str:
        """The path that the program knows for one in the scratch folder."""
        if path == self.root or path.startswith(self.root + "/"):
            return path[len(self.root) :] or "/"
        return path

    def locate(
        self, path: Any, dir_fd: int | None = None, follow: bool = True, entry: bool = False
    ) -> _Place:
        """`entry`: the name itself is meant, as by rename, also with a slash behind it."""
        with self._lock:
            self._catch_up()
            text = self.known_as(os.fsdecode(path))
            if not text:
                raise _error(errno.ENOENT, path)
            if not text.startswith("/"):
                text = self._folder_of(dir_fd) + "/" + text
            stripped = text.rstrip("/")
            folder, _, name = stripped.rpartition("/")
            if name in (".", ".."):
                folder, name = stripped, ""
            found = self._folder(folder)
            if found.rest or not name:
                if name:
                    found.rest += "/" + name
                return found
            slash = text != stripped
            place = self._walk(found, [name], follow or (slash and not entry))
            if slash:
                place.rest = place.rest or "/"
            is_file = place.stat is not None and not place.above and place.stat.st_nlink > 1
            if is_file and self._is_copied(place):
                with self._changing():
                    self._raise(place)
            return place

    def _is_copied(self, place: _Place) -> bool:
        """Whether another name of the file is above."""
        return place.stat is not None and identity(place.stat) in self._hard_linked

    def _folder_of(self, fd: int | None) -> str:
        """The current folder, or that of a descriptor, as the program knows it."""
        fd = self._cwd_fd if fd is None else fd
        if fd is None:
            return self.known_as(REAL.getcwd())
        REAL.fstat(fd)  # raises where it is closed
        path = self.known_as(REAL.readlink(f"/proc/self/fd/{fd}"))
        if path.endswith(" (deleted)"):
            raise _error(errno.ENOENT, "")
        return path

    def _folder(self, folder: str) -> _Place:
        found = self._folders.get(folder)
        if found is None:
            root = _Place("/", None, True, "/", REAL.lstat(self.root))
            found = self._walk(root, folder.split("/"), True)
            if found.stat is None or not stat.S_ISDIR(found.mode):
                found.rest = found.rest or "/."  # for the kernel to refuse
            elif not found.rest and not found.path.startswith(_OF_KERNEL):
                self._folders[folder] = found
        return found

    def _walk(self, place: _Place, names: list[str], follow: bool) -> _Place:
        names = [name for name in reversed(names) if name not in ("", ".")]
        links = place.links
        while names:
            name = names.pop()
            if name == "..":
                place = place.parent or place
                continue
            child = self._step(place, name)
            if stat.S_ISLNK(child.mode) and (names or follow):
                target = REAL.readlink(self.where(child))
                if not _leads_nowhere(child.path, target):
                    links += 1
                    if links > _MAX_LINKS:
                        raise _error(errno.ELOOP, place.path)
                    target = self.known_as(target)
                    names += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                    if target.startswith("/"):
                        place = _Place("/", None, True, "/", REAL.lstat(self.root))
                    continue
            place = child
            if names and not stat.S_ISDIR(place.mode):
                place.rest = "/" + "/".join(reversed(names))
                break
        return replace(place, links=links)

    def _step(self, folder: _Place, name: str) -> _Place:
        path = posixpath.join(folder.path, name)
        lower = None if folder.lower is None else posixpath.join(folder.lower, name)
        if folder.above:
            with contextlib.suppress(FileNotFoundError):
                found = REAL.lstat(self.root + path)
                origin = self._origins.get(found.st_ino)
                return _Place(path, folder, True, None if origin is None else origin.lower, found)
            origin = self._origin_of(folder)
            lower = None if origin is None or name in origin.taken else posixpath.join(origin.lower, name)
        with contextlib.suppress(FileNotFoundError):
            if lower is not None:
                return _Place(path, folder, False, lower, REAL.lstat(lower))
        return _Place(path, folder, False, None, None)

    def where(self, place: _Place) -> str:
        """The path of its metadata and of a folder's own entries; where there is nothing, of none."""
        above = place.above or place.lower is None
        return (self.root + place.path if above else str(place.lower)) + place.rest

    def content(self, place: _Place) -> str:
        """The path of a file's content."""
        origin = self._origin_of(place)
        unfilled = origin is not None and not origin.filled and stat.S_ISREG(place.mode) and not place.rest
        return origin.lower if origin is not None and unfilled else self.where(place)

    # Entries in the scratch folder ----------------------------------------------------------------------

    def _raise(self, place: _Place) -> None:
        """Make an entry of the file system in the scratch folder."""
        if place.above or place.lower is None or place.parent is None or place.stat is None:
            return
        if place.path.startswith(_OF_KERNEL):
            raise _error(errno.EACCES, place.path)
        folder, upper, found, lower = place.parent, self.root + place.path, place.stat, place.lower
        self._raise(folder)
        with contextlib.suppress(FileNotFoundError):  # another place of the same path was raised
            place.stat, place.above = REAL.lstat(upper), True
            return
        origin, kept = self._origin(lower, found), f"{self.linked}/{found.st_dev}-{found.st_ino}"
        with self._unchanged(folder):
            if stat.S_ISDIR(found.st_mode):
                REAL.mkdir(upper)
            elif stat.S_ISLNK(found.st_mode):
                REAL.symlink(REAL.readlink(lower), upper)
            elif not stat.S_ISREG(found.st_mode):
                REAL.mkfifo(upper)  # what it is is told by its origin
            elif identity(found) in self._hard_linked:
                REAL.link(kept, upper)
            else:
                fd = REAL.open(upper, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                os.ftruncate(fd, found.st_size)
                os.close(fd)
                if found.st_nlink > 1:
                    REAL.link(upper, kept)
                    origin.kept_name = True
            made = REAL.lstat(upper)
            known = self._origins.get(made.st_ino)
            if known is None:
                with contextlib.suppress(PermissionError):
                    owner = {"follow_symlinks": False, "dir_fd": self.scratch_fd}
                    REAL.chown(self._relative(upper), *origin.owner, **owner)
                self._set_attributes(upper, found)
        if known is None:
            origin.counted = 0 if stat.S_ISDIR(made.st_mode) else 1 + self._removed.get(identity(found), 0)
            self._record("made", made.st_ino, asdict(origin))
        else:
            self._record("set", made.st_ino, {"counted": known.counted + 1})
        assert folder.stat is not None
        if folder.stat.st_ino in self._origins:
            self._record(
                "taken", folder.stat.st_ino, (posixpath.basename(lower), stat.S_ISDIR(found.st_mode))
            )
        place.above, place.stat = True, REAL.lstat(upper)
        if stat.S_ISDIR(made.st_mode):
            if self._cwd_fd is None and self._cwd == lower:
                self._cwd_fd = self._keep_open(upper, getattr(os, "O_PATH", 0))
            self._continue_with(upper, origin)

    def _relative(self, upper: str) -> str:
        return upper[len(self.root) + 1 :] or "."

    def _set_attributes(self, upper: str, of: os.stat_result) -> None:
        if not stat.S_ISLNK(of.st_mode):
            REAL.chmod(self._relative(upper), stat.S_IMODE(of.st_mode), dir_fd=self.scratch_fd)
        times = of.st_atime_ns, of.st_mtime_ns
        REAL.utime(self._relative(upper), ns=times, dir_fd=self.scratch_fd, follow_symlinks=False)

    @contextlib.contextmanager
    def _unchanged(self, place: _Place) -> Iterator[None]:
        """What we do in a folder, or to a file, is not seen in its time, and its mode does not hinder us."""
        upper = self.root + place.path
        before = REAL.lstat(upper)
        if before.st_mode & 0o700 != 0o700 and before.st_uid == os.geteuid() != 0:
            REAL.chmod(self._relative(upper), 0o700, dir_fd=self.scratch_fd)
        try:
            yield
        finally:
            self._set_attributes(upper, before)

    def _raise_parent(self, place: _Place) -> None:
        """Before an entry is made or removed."""
        folder = place.parent
        if place.rest not in ("", "/") or folder is None:
            return
        if folder.path == "/proc" or place.path.startswith(_OF_KERNEL):
            raise _error(errno.EACCES, place.path)
        self._raise(folder)
        origin = self._origin_of(folder)
        if origin is not None and origin.denied:
            raise _error(errno.EACCES, place.path)

    def _fill_changed(self, place: _Place) -> None:
        """A file is opened for reading: its descriptor tells its metadata."""
        origin = self._origin_of(place)
        if origin is not None and origin.changed and not origin.filled:
            with self._changing():
                self._fill(place)

    def _raise_renamed(self, place: _Place) -> None:
        """A folder below one that was renamed: by a descriptor, it would be found where it was."""
        if not place.above and place.lower not in (None, place.path):
            with self._changing():
                self._raise(place)

    def _raise_one_below(self, place: _Place) -> None:
        """So that the kernel finds a folder that is not empty."""
        origin = self._origin_of(place)
        if origin is not None and stat.S_ISDIR(place.mode):
            for name in self._left(origin):
                self._raise(self._step(place, name))
                break

    def _raise_open_below(self, place: _Place) -> None:
        """A folder is renamed: what is open below it is found by its path, which changes."""
        if not stat.S_ISDIR(place.mode):
            return
        below = place.path.rstrip("/") + "/"
        paths = [path for _, path in open_files()] + [self._cwd]
        for path in paths:
            known = self.known_as(path)
            if known.startswith(below) and known == path:
                self._raise(self._folder(posixpath.dirname(path)))
                self._raise(self.locate(path, follow=False))

    def _fill(self, place: _Place, copy: bool = True) -> None:
        """Copy the content of a file; what this process has open of it continues with the copy."""
        origin, upper = self._origin_of(place), self.root + place.path
        if origin is None or origin.filled or not stat.S_ISREG(place.mode):
            return
        if copy:
            with self._unchanged(place):
                copy_content(origin.lower, upper)
        assert place.stat is not None
        self._record("set", place.stat.st_ino, {"filled": True})
        self._continue_with(upper, origin)

    @staticmethod
    def _continue_with(upper: str, origin: _Origin) -> None:
        original = origin.device, origin.inode
        for fd, path in open_files():
            with contextlib.suppress(OSError):
                if path != origin.lower and not path.endswith("(deleted)") and origin.links < 2:
                    continue
                if identity(REAL.fstat(fd)) != original:
                    continue
                continue_with(fd, upper, flags_of(fd))
        for mapping in shared_mappings(writable=False):
            if mapping.path == origin.lower and mapping.inode == origin.inode:
                with contextlib.suppress(OSError):
                    fd = REAL.open(upper, os.O_RDONLY)
                    map_at(mapping, fd, mmap.MAP_SHARED)
                    os.close(fd)

    def _forget(self, gone: os.stat_result | None) -> None:
        """Its inode number may be given to another file."""
        if gone is None:
            return
        if gone.st_ino in self._origins and (stat.S_ISDIR(gone.st_mode) or gone.st_nlink < 2):
            self._record("gone", gone.st_ino)
        elif not stat.S_ISREG(gone.st_mode):
            self._record("folders")  # links and folders, which were cached

    def _seen(self, found: os.stat_result) -> os.stat_result:
        """Of an entry in the scratch folder: what is told of the original."""
        origin = self._origins.get(found.st_ino) if found.st_dev == self._device else None
        removed = 0 if origin is not None or found.st_nlink < 2 else self._removed.get(identity(found), 0)
        if origin is None and not removed:
            return found
        values, more = _fields(found)
        values[3] -= removed
        if origin is None:
            return os.stat_result(values, more)
        values[1:3] = origin.inode, origin.device
        if (values[4], values[5]) != origin.owner and os.geteuid() != 0:
            values[4:6] = origin.owner
        if stat.S_ISDIR(found.st_mode):
            if origin.links > 1:
                values[3] += origin.links - 2 - origin.counted
            return os.stat_result(values, more)
        values[3] += origin.links - origin.counted - origin.kept_name
        if not origin.filled and not stat.S_ISLNK(found.st_mode):
            if not stat.S_ISREG(found.st_mode):
                with contextlib.suppress(OSError):
                    lower = REAL.stat(origin.lower)
                    return lower if not stat.S_ISFIFO(lower.st_mode) else os.stat_result(values, more)
            more = more | {"st_blocks": origin.blocks}
        return os.stat_result(values, more)

    def _left(self, origin: _Origin) -> Iterator[str]:
        return (name for name in REAL.listdir(origin.lower) if name not in origin.taken)

    def _names(self, place: _Place) -> list[str]:
        """What is in a folder, as the program left it."""
        names = REAL.listdir(self.where(place))
        origin = self._origin_of(place)
        return names if origin is None else [*names, *self._left(origin)]

    # What programs call: opening ------------------------------------------------------------------------

    def io_open(
        self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
        newline: Any = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        if isinstance(file, int) or (opener is None and not self.is_used() and not set(mode) & set("wax+")):
            return REAL.io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        opener = self._open_for_python if opener is None else opener
        with self._opening(file):
            return REAL.io_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    @contextlib.contextmanager
    def _opening(self, file: Any) -> Iterator[None]:
        """Python's open tells audit hooks of the file, though its opener opens another."""
        before, self._thread.opening = getattr(self._thread, "opening", None), os.fspath(file)
        try:
            yield
        finally:
            self._thread.opening = before

    def is_opening(self, file: Any) -> bool:
        return file is not None and file == getattr(self._thread, "opening", None)

    def _open_for_python(self, path: Any, flags: int) -> int:
        return self.open(path, flags, 0o666)

    def open_code(self, path: str) -> Any:
        return self.io_open(path, "rb")

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        changes = flags & WRITE_FLAGS or (_UNNAMED and flags & _UNNAMED == _UNNAMED)
        if not changes and not self.is_used():
            return REAL.open(path, flags, mode, dir_fd=dir_fd)
        follow = not flags & os.O_NOFOLLOW and not (flags & os.O_CREAT and flags & os.O_EXCL)
        with _named(path):
            if not changes:
                place = self.locate(path, dir_fd, follow)
                if stat.S_ISDIR(place.mode):
                    self._raise_renamed(place)
                self._fill_changed(place)
                if not stat.S_ISFIFO(place.mode) or place.path.startswith(_OF_KERNEL):
                    return REAL.open(self.content(place), flags, mode)
            with self._changing():
                place = self.locate(path, dir_fd, follow)
                where = self._prepare_open(place, flags)
            opened = REAL.open(where, flags, mode)
            if where == self.root + place.path and flags & os.O_TRUNC and place.stat is not None:
                with self._changing():
                    self._fill(place, copy=False)
            return opened

    def _prepare_open(self, place: _Place, flags: int) -> str:
        if place.path.startswith(_OF_KERNEL):
            own = ("/proc/thread-self/", "/proc/self/", f"/proc/{os.getpid()}/")
            if not place.path.startswith(own) and place.stat is not None:
                raise _error(errno.EACCES, place.path)
            return str(place.lower or place.path) + place.rest
        kind = place.mode
        origin = self._origin_of(place)
        if place.lower is not None and _is_device(
            kind if origin is None else REAL.lstat(origin.lower).st_mode
        ):
            return place.lower
        if place.stat is None:
            if flags & os.O_CREAT:
                self._raise_parent(place)
            return self.root + place.path + place.rest
        self._raise(place)
        if place.rest not in ("", "/"):
            return self.where(place)
        origin = self._origin_of(place)
        if origin is not None and origin.denied and not flags & os.O_EXCL:
            raise _error(
                errno.EISDIR if stat.S_ISDIR(kind) and not flags & _UNNAMED else errno.EACCES, place.path
            )
        if not flags & os.O_TRUNC and not (flags & os.O_CREAT and flags & os.O_EXCL):
            self._fill(place)
        return self.where(place)

    def truncate(self, path: Any, length: int) -> None:
        if isinstance(path, int):
            return os.ftruncate(path, length)
        if length < 0:
            raise _error(errno.EINVAL, os.fspath(path))
        fd = self.open(path, os.O_WRONLY)
        try:
            with _named(path):
                os.ftruncate(fd, length)
        finally:
            os.close(fd)

    # Entries of folders ---------------------------------------------------------------------------------

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        with _named(path), self._changing():
            place = self.locate(path, dir_fd, follow=False, entry=True)
            self._raise_parent(place)
            folder, is_below = place.parent, stat.S_ISREG(place.mode) and not place.above and not place.rest
            if folder is not None and folder.stat and place.stat and is_below and not self._is_copied(place):
                self._record("taken", folder.stat.st_ino, (posixpath.basename(place.path), False))
                if place.stat.st_nlink > 1:
                    self._record("removed", *identity(place.stat))
                REAL.utime(self._relative(self.root + folder.path), dir_fd=self.scratch_fd)
                return
            self._raise(place)
            REAL.unlink(self.where(place))
            self._forget(place.stat)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        with _named(path), self._changing():
            place = self.locate(path, dir_fd, follow=False, entry=True)
            self._refuse_dots((path,), (place,), (errno.EINVAL, errno.ENOTEMPTY))
            self._raise_parent(place)
            self._raise(place)
            self._raise_one_below(place)
            REAL.rmdir(self.where(place))
            self._forget(place.stat)

    @staticmethod
    def _refuse_dots(paths: tuple[Any, ...], places: tuple[_Place, ...], numbers: tuple[int, int]) -> None:
        names = [posixpath.basename(os.fsdecode(path).rstrip("/")) for path in paths]
        if {".", ".."} & {*names} and not any(place.rest.strip("/") for place in places):
            raise _error(numbers[".." in names], *paths)

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        with _named(src, dst), self._changing():
            old = self.locate(src, src_dir_fd, follow=False, entry=True)
            new = self.locate(dst, dst_dir_fd, follow=False, entry=True)
            self._refuse_dots((src, dst), (old, new), (errno.EBUSY, errno.EBUSY))
            for place in (old, new):
                if old.stat is not None:
                    self._raise_parent(place)
                elif place.parent is not None and not place.rest:
                    self._raise(place.parent)
                self._raise(place)
            self._raise_open_below(old)
            self._raise_one_below(new)
            REAL.rename(self.where(old), self.where(new))
            if old.stat is not None and identity(old.stat) != (new.stat and identity(new.stat)):
                self._forget(new.stat)
            self._record("folders")

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._make(REAL.mkdir, path, dir_fd, mode)

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        self._make(REAL.mkfifo, path, dir_fd, mode)

    def mknod(self, path: Any, mode: int = 0o600, device: int = 0, *, dir_fd: int | None = None) -> None:
        self._make(REAL.mknod, path, dir_fd, mode, device)

    def _make(self, make: Callable[..., None], path: Any, dir_fd: int | None, *args: Any) -> None:
        with _named(path if make is REAL.mkdir else None), self._changing():  # as Python's functions do
            place = self.locate(path, dir_fd, follow=False, entry=True)
            if place.stat is None:
                self._raise_parent(place)
            self._raise(place)
            make(self.where(place), *args)
            self._record("folders")

    def link(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:  # fmt: skip
        with _named(src, dst), self._changing():
            # Without descriptors Python calls link(), which follows none.
            follow = follow_symlinks and not (src_dir_fd is None and dst_dir_fd is None)
            old = self.locate(src, src_dir_fd, follow)
            new = self.locate(dst, dst_dir_fd, follow=False, entry=True)
            self._raise(old)
            if old.stat is not None and new.stat is None:
                self._raise_parent(new)
            self._raise(new)
            REAL.link(self.where(old), self.where(new))
            if self._origin_of(old) is not None and old.stat is not None:
                self._record("set", old.stat.st_ino, {"changed": True})

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        with _named(src, dst), self._changing():
            place = self.locate(dst, dir_fd, follow=False, entry=True)
            if place.stat is None:
                self._raise_parent(place)
            self._raise(place)
            REAL.symlink(src, self.where(place))
            self._record("folders")

    def creating(self, path: Any) -> str:
        """Where to make or change what C code opens by itself, such as a socket."""
        with _named(path), self._changing():
            place = self.locate(path)
            if place.stat is None:
                self._raise_parent(place)
            self._raise(place)
            self._fill(place)
            return self.where(place)

    def existing(self, path: Any) -> str:
        with _named(path):
            return self.content(self.locate(path))

    def _open_folder(self, path: Any) -> _Place | None:
        """None: Python's own function does it."""
        if not self.is_used():
            return None
        if isinstance(path, int):
            is_folder = stat.S_ISDIR(REAL.fstat(path).st_mode)
            return self.locate(self._folder_of(path)) if is_folder else None
        place = self.locate("." if path is None else path)
        return None if place.path.startswith(_OF_KERNEL) else place

    def listdir(self, path: Any = None) -> Any:
        with _named(path):
            place = self._open_folder(path)
            if place is None:
                return REAL.listdir(path)
            names = self._names(place)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = None) -> Any:
        with _named(path):
            place = self._open_folder(path)
            if place is None:
                return REAL.scandir(path)
            given = "." if path is None else path if isinstance(path, int) else os.fspath(path)
            return _Entries([_Entry(given, place, name) for name in self._names(place)])

    def chdir(self, path: Any) -> None:
        if isinstance(path, int):
            return self.fchdir(path)
        with _named(path), self._changing():
            place = self.locate(path)
            self._enter(place)

    def fchdir(self, fd: int) -> None:
        with self._changing():
            REAL.fchdir(fd)
            self._enter(self.locate(self._folder_of(fd)))

    def _enter(self, place: _Place) -> None:
        """The process itself is where C libraries find the files that the program has not made."""
        self._raise_renamed(place)
        where = self.where(place)
        REAL.chdir(where)
        if place.above and place.lower is not None:
            with contextlib.suppress(OSError):
                REAL.chdir(place.lower)
        self._cwd = REAL.getcwd()
        if self._cwd_fd is not None:
            os.close(self._cwd_fd)
        self._cwd_fd = self._keep_open(where, getattr(os, "O_PATH", 0)) if place.above else None

    def getcwd(self) -> str:
        with _named(None):
            return self._folder_of(None)

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    # Metadata -------------------------------------------------------------------------------------------

    def fstat(self, fd: int) -> os.stat_result:
        return self._seen(REAL.fstat(fd))

    def reading(self, name: str) -> Callable[..., Any]:
        real = getattr(REAL, name)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return self.fstat(path) if name == "stat" else real(path, *args, **kwargs)
            if not self.is_used():
                return real(path, *args, **kwargs)
            follow = name not in ("lstat", "readlink") and kwargs.get("follow_symlinks", True)
            with _named(path):
                try:
                    place = self.locate(path, kwargs.pop("dir_fd", None), follow)
                except OSError:
                    if name == "access":
                        return False
                    raise
                origin = self._origin_of(place)
                if name == "access" and origin is not None and origin.denied and args[0] & os.W_OK:
                    return False
                where = self.content(place) if name.endswith("xattr") else self.where(place)
                found = real(os.fsencode(where) if isinstance(path, bytes) else where, *args, **kwargs)
            return self._seen(found) if name in ("stat", "lstat") else found

        return call

    def changing(self, name: str) -> Callable[..., Any]:
        """chmod, chown and utime, of paths and descriptors. Errors of utime name no file."""
        real = getattr(REAL, name)
        by_path = getattr(REAL, {"fchmod": "chmod", "fchown": "chown", "lchown": "chown"}.get(name, name))

        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
            with _named(path if name != "utime" else None), self._changing():
                if isinstance(path, int):
                    kept = self._own_descriptor(path)
                    if kept is not None:
                        by_path(kept, *args, dir_fd=self.scratch_fd, **kwargs)
                    return
                if name == "lchown":
                    kwargs["follow_symlinks"] = False
                of_link = name == "chmod" and not kwargs.get("follow_symlinks", True)
                if of_link and REAL.chmod not in os.supports_follow_symlinks:
                    return real(path, *args, **kwargs)  # which says so
                place = self.locate(path, dir_fd, kwargs.get("follow_symlinks", True))
                self._raise(place)
                origin = self._origin_of(place)
                if origin is not None and origin.owner[0] != os.geteuid() != 0:
                    raise _error(errno.EPERM, path)
                if origin is not None and not origin.filled and name != "utime":
                    self._fill_if_open(place, origin)
                where = self.where(place)
                if origin is not None and place.stat is not None:
                    self._record("set", place.stat.st_ino, {"changed": True})
                by_path(self._relative(where), *args, dir_fd=self.scratch_fd, **kwargs)

        return call

    def _fill_if_open(self, place: _Place, origin: _Origin) -> None:
        """Who has it open sees its new mode."""
        if any(path == origin.lower for _, path in open_files()):
            self._fill(place)

    def _own_descriptor(self, fd: int) -> str | None:
        """A path of a file of ours by its descriptor; None for what is not a file."""
        found = REAL.fstat(fd)
        path = REAL.readlink(f"/proc/self/fd/{fd}")
        if path.startswith(("/proc/", "/dev/pts/")) or not path.startswith("/"):
            return None
        if found.st_dev != self._device or self.known_as(path) == path:
            with contextlib.suppress(OSError):
                place = self.locate(path)
                self._raise(place)
                self._fill(place)
            path = REAL.readlink(f"/proc/self/fd/{fd}")
            if self.known_as(path) == path:  # in a folder that was renamed since
                return None
        return f"/proc/self/fd/{fd}"

    def without_attributes(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Extended attributes, which few file systems of containers have."""
        raise _error(errno.ENOTSUP, path)

    # Databases ------------------------------------------------------------------------------------------

    def database(self, given: Any, uri: bool) -> Any:
        """The path or URI in the scratch folder by which SQLite opens it, with the files beside it."""
        text = os.fsdecode(given) if not isinstance(given, str) else given
        parts = urllib.parse.urlsplit(text) if uri and text.startswith("file:") else None
        path = text if parts is None else urllib.parse.unquote(parts.path)
        if path in ("", ":memory:") or (parts is not None and "mode=memory" in parts.query):
            return given
        with self._changing():
            try:
                main = self.locate(path)
            except OSError:
                return self.root + "/.none/database"  # for SQLite to fail
            for suffix in ("", "-wal", "-journal"):
                place = self.locate(main.path + main.rest + suffix)
                self._raise_parent(place)
                self._raise(place)
                self._fill(place)
            where = self.root + main.path + main.rest
        if parts is None:
            return where
        return f"file:{urllib.parse.quote(where)}" + (f"?{parts.query}" if parts.query else "")


def identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _fields(found: os.stat_result) -> tuple[list[Any], dict[str, Any]]:
    reduced: Any = found.__reduce__()
    values, more = reduced[1]
    return list(values), dict(more)


def _is_device(mode: int) -> bool:
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _leads_nowhere(path: str, target: str) -> bool:
    """A link of /proc to what has no name: a pipe, a deleted file; and the standard streams."""
    if not path.startswith("/proc/"):
        return False
    folder, name = posixpath.split(path)
    if not folder.endswith("/fd"):
        return False
    return not target.startswith("/") or target.endswith(" (deleted)") or name in ("0", "1", "2")


def open_files() -> list[tuple[int, str]]:
    found = []
    with contextlib.suppress(OSError):
        for entry in REAL.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append((int(entry), REAL.readlink(f"/proc/self/fd/{entry}")))
    return [(fd, path) for fd, path in found if fd > 2 and path.startswith("/")]


def flags_of(fd: int) -> int:
    """Of an open file, those that hold for a copy of it."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_GETFL) & _OF_DESCRIPTORS


def continue_with(fd: int, path: str, flags: int) -> None:
    """A descriptor is of another file from now on, at the same position."""
    opened = REAL.open(path, flags)
    if not flags & getattr(os, "O_PATH", 0):
        os.lseek(opened, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(opened, fd, os.get_inheritable(fd))
    os.close(opened)


def copy_content(source: str, target: str) -> None:
    """With its holes."""
    read = REAL.open(source, os.O_RDONLY)
    try:
        write = REAL.open(target, os.O_WRONLY)
        try:
            size = end = REAL.fstat(read).st_size
            os.ftruncate(write, size)
            start = 0
            while start < size:
                if hasattr(os, "SEEK_DATA"):
                    try:
                        start = os.lseek(read, start, os.SEEK_DATA)
                    except OSError:  # a hole to its end
                        break
                    end = os.lseek(read, start, os.SEEK_HOLE)
                os.lseek(read, start, os.SEEK_SET)
                os.lseek(write, start, os.SEEK_SET)
                while start < end and (piece := os.read(read, min(end - start, 1 << 24))):
                    start += os.write(write, piece)
                if start < end:
                    break
        finally:
            os.close(write)
    finally:
        os.close(read)


class _Entries(contextlib.AbstractContextManager["_Entries"]):
    """What os.scandir returns: an iterator that can be closed."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __exit__(self, *error: Any) -> None:
        self._entries = iter(())

    def close(self) -> None:
        self._entries = iter(())


class _Entry:
    """os.DirEntry, which cannot be made."""

    def __init__(self, given: Any, folder: _Place, name: str) -> None:
        self._full = posixpath.join(folder.path, name)
        self.name = os.fsencode(name) if isinstance(given, bytes) else name
        self.path = self.name if isinstance(given, int) else posixpath.join(given, self.name)

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        with _named(self.path):
            return os.stat(self._full, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow).st_mode)
        except FileNotFoundError:
            return False


installed: Overlay | None = None  # in this process
