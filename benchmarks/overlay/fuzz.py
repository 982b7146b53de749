# ruff: noqa: SIM115
"""Random sequences of file operations, in a real folder and in a prediction: the same results and errors.

    python -m benchmarks.overlay.fuzz --sequences 500 --operations 40 --seed 0

Each sequence runs twice, in two folders of the same path and content: as it is, and in a function that
`oomph.predict` runs. Compared are the results of every operation, its error (class, errno, file names), and
the tree that is left; of inode and device numbers only whether it is still the same file. The second folder
must not have changed. Prints the first difference of each sequence; exit status 1 if there is any.
"""

from __future__ import annotations

import argparse
import glob
import json
import mmap
import os
import random
import re
import shutil
import sqlite3
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import oomph

OLD = 1_500_000_000
FILES = ("a", "b", "d/a", "d/e/f", "d/e/g", "h1", "d/h2", "ro", "w/x/y/z")
NAMES = (
    *FILES, "d", "d/e", "empty", "w", "w/x", "w/x/y", "link", "dl", "dl/a", "dl/e", "w/up", "w/up/a",
    "dangling", "loop",
    "missing", "missing/x", "a/x", "d/new", "new", "n2", "w/new", "empty/n", "n2/x", "d/e/n", "fifo",
)  # fmt: skip
ODD = (
    "d/",
    "a/",
    "./a",
    "d/../b",
    "d/./a",
    "w/x/../..",
    "new/",
    "dl/",
    "link/",
    ".",
    "..",
    "d/..",
    "",
    "dl/../a",
    "d//a",
)


def fill(folder: Path) -> None:
    """The tree that every sequence begins with."""
    for index, name in enumerate(FILES):
        if name != "d/h2":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(bytes([65 + index]) * (10 + 900 * index) + b"\n")
    os.link(folder / "h1", folder / "d/h2")
    (folder / "empty").mkdir()
    (folder / "ro").chmod(0o444)
    (folder / "w/x").chmod(0o750)
    links = (
        ("link", "a"),
        ("dl", "d"),
        ("dangling", "nowhere"),
        ("loop", "loop"),
        ("w/up", "../d"),
        ("w/abs", folder / "a"),
    )
    for name, target in links:
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "fifo")
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (OLD, OLD + len(str(path))), follow_symlinks=False)
    os.utime(folder, (OLD, OLD))


def described(found: os.stat_result) -> list[Any]:
    when = "now" if found.st_mtime > time.time() - 3600 else round(found.st_mtime)
    size = None if stat.S_ISDIR(found.st_mode) else found.st_size
    return [oct(found.st_mode), found.st_nlink, size, found.st_uid, found.st_gid, when]


def tree(folder: str) -> list[Any]:
    """All that is in a folder."""
    rows: list[Any] = []
    for root, folders, files in os.walk(folder):
        for name in sorted((*folders, *files, ".")):
            path = os.path.join(root, name)
            found = os.lstat(path)
            content = None
            if stat.S_ISREG(found.st_mode):
                with open(path, "rb") as file:
                    content = file.read().hex()[:200]
            elif stat.S_ISLNK(found.st_mode):
                content = os.readlink(path)
            rows.append([path, described(found), content])
    return sorted(rows, key=lambda row: row[0])


class Sequence:
    """Runs operations in a folder. What they draw depends on the seed alone, and not on what they find."""

    def __init__(self, seed: int, operations: int, folder: str) -> None:
        self.random, self.folder, self.operations = random.Random(seed), folder, operations
        self.files: list[Any] = [None] * 3
        self.fds: list[int | None] = [None] * 3
        self.folders: list[int | None] = [None] * 2
        self.maps: list[Any] = [None] * 2

    def run(self) -> list[Any]:
        os.chdir(self.folder)
        outcomes = []
        for _ in range(self.operations):
            name = self.random.choice(OPERATIONS)
            drawn = random.Random(self.random.random())
            self.draw = drawn
            outcomes.append([name, self._outcome(getattr(self, "do_" + name)), self.drawn()])
        os.chdir(self.folder)
        for index in range(3):
            outcomes.append(["left in a file", self._outcome(lambda index=index: self._rest(index)), ""])
        outcomes.append(["tree", tree(self.folder), ""])
        self._close()
        return outcomes

    def drawn(self) -> str:
        text, self.log = getattr(self, "log", ""), ""
        return text

    def _outcome(self, operation: Callable[[], Any]) -> Any:
        try:
            return self._plain(operation())
        except shutil.Error as error:
            return [
                "shutil.Error",
                sorted(str(each[0]) for each in error.args[0])
                if isinstance(error.args[0], list)
                else str(error),
            ]
        except OSError as error:
            return [
                type(error).__name__,
                error.errno,
                self._plain(error.filename),
                self._plain(error.filename2),
            ]
        except RecursionError:
            return ["RecursionError"]
        except Exception as error:
            return [type(error).__name__, str(error)[:80]]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, os.stat_result):
            return described(value)
        if isinstance(value, (bytes, bytearray)):
            return value[:300].hex()
        if isinstance(value, os.PathLike):
            return "path " + str(value)
        if isinstance(value, (list, tuple)):
            return [self._plain(each) for each in value]
        return re.sub(r"tmp\w{8}$", "tmp*", value) if isinstance(value, str) else value

    def _close(self) -> None:
        for each in (*self.files, *self.maps):
            if each is not None:
                each.close()
        for fd in (*self.fds, *self.folders):
            if fd is not None:
                os.close(fd)

    # What operations draw -------------------------------------------------------------------------------

    def noted(self, value: Any) -> Any:
        self.log = f"{getattr(self, 'log', '')} {value!r}"
        return value

    def name(self, *, fifo: bool = True) -> str:
        pool = ODD if self.draw.random() < 0.12 else NAMES
        name = self.draw.choice(pool)
        return self.noted(name if fifo or name != "fifo" else "a")

    def path(self, *, fifo: bool = True) -> Any:
        name, kind = self.name(fifo=fifo), self.draw.random()
        if kind < 0.15:
            return os.path.join(self.folder, name)
        if kind < 0.25 and name:
            return Path(name)
        return name.encode() if kind < 0.3 else name

    def text(self) -> str:
        return self.draw.choice("pqrs") * self.draw.choice((0, 1, 7, 500))

    def _slot(self, slots: list[Any]) -> int:
        return self.noted(self.draw.randrange(len(slots)))

    def _file(self) -> Any:
        file = self.files[self._slot(self.files)]
        if file is None:
            raise LookupError("no file")
        return file

    def _fd(self) -> int:
        fd = self.fds[self._slot(self.fds)]
        if fd is None:
            raise LookupError("no descriptor")
        return fd

    def _folder(self) -> int:
        fd = self.folders[self._slot(self.folders)]
        if fd is None:
            raise LookupError("no folder")
        return fd

    def _rest(self, index: int) -> Any:
        file = self.files[index]
        if file is None or not file.readable():
            return None
        file.seek(0)
        return file.read()[:300]

    # Opening, reading, writing --------------------------------------------------------------------------

    def do_open(self) -> Any:
        slot, path = self._slot(self.files), self.path(fifo=False)
        mode = self.noted(self.draw.choice(("r", "w", "a", "x", "r+", "w+", "a+", "r", "r+")))
        file = open(path, mode)
        if self.files[slot] is not None:
            self.files[slot].close()
        self.files[slot] = file
        return [file.name, file.mode]

    do_open_again = do_open_file = do_open

    def do_write(self) -> Any:
        file = self._file()
        return [file.write(self.text()), file.flush(), file.tell()]

    do_write_more = do_write

    def do_read(self) -> Any:
        file = self._file()
        return [file.read(self.draw.choice((1, 5, -1)))[:300], file.tell()]

    do_read_more = do_read

    def do_seek(self) -> Any:
        return self._file().seek(self.draw.choice((0, 3, 5000)))

    def do_truncate_file(self) -> Any:
        return self._file().truncate(self.draw.choice((None, 0, 4, 600)))

    def do_read_all(self) -> Any:
        with open(self.path(fifo=False), "rb") as file:
            return file.read()

    def do_append(self) -> Any:
        with open(self.path(fifo=False), "a") as file:
            return [file.tell(), file.write(self.text())]

    def do_write_all(self) -> Any:
        with open(self.path(fifo=False), self.draw.choice(("w", "wb+", "xb", "x+"))) as file:
            return file.write(self.text() if "b" not in file.mode else self.text().encode())

    def do_update(self) -> Any:
        with open(self.path(fifo=False), "r+b") as file:
            return [file.read(3), file.seek(2), file.write(self.text().encode()), file.seek(0), file.read()]

    def do_os_open(self) -> Any:
        slot, path = self._slot(self.fds), self.path()
        flags = self.draw.choice((os.O_RDONLY, os.O_WRONLY, os.O_RDWR))
        for flag in ("O_CREAT", "O_EXCL", "O_TRUNC", "O_APPEND", "O_NOFOLLOW", "O_DIRECTORY"):
            if self.draw.random() < (0.5 if flag == "O_CREAT" else 0.2):
                flags |= getattr(os, flag)
        fd = os.open(path, self.noted(flags) | os.O_NONBLOCK, 0o640)
        if self.fds[slot] is not None:
            os.close(self.fds[slot])
        self.fds[slot] = fd
        return os.fstat(fd)

    do_os_open_again = do_os_open

    def do_unnamed(self) -> Any:
        slot = self._slot(self.fds)
        fd = os.open(self.path(), os.O_TMPFILE | self.draw.choice((os.O_RDWR, os.O_WRONLY)), 0o600)
        if self.fds[slot] is not None:
            os.close(self.fds[slot])
        self.fds[slot] = fd
        return [os.write(fd, b"abc"), os.fstat(fd)]

    def do_os_write(self) -> Any:
        return os.write(self._fd(), self.text().encode())

    def do_os_read(self) -> Any:
        fd = self._fd()
        return [os.lseek(fd, self.draw.choice((0, 2, 100)), os.SEEK_SET), os.read(fd, 50)]

    def do_pread(self) -> Any:
        return os.pread(self._fd(), 100, self.draw.choice((0, 3)))

    def do_pwrite(self) -> Any:
        return os.pwrite(self._fd(), b"PW", self.draw.choice((0, 3)))

    def do_ftruncate(self) -> Any:
        return os.ftruncate(self._fd(), self.draw.choice((0, 5, 700)))

    def do_fstat(self) -> Any:
        return os.fstat(self._fd())

    def do_fchmod(self) -> Any:
        fd = self._fd()
        return [os.fchmod(fd, self.draw.choice((0o600, 0o644, 0o444))), oct(os.fstat(fd).st_mode)]

    def do_futime(self) -> Any:
        fd = self._fd()
        return [os.utime(fd, (OLD, OLD + 7)), os.fstat(fd)]

    def do_same_as_open(self) -> Any:
        return os.path.samestat(os.fstat(self._fd()), os.stat(self.path()))

    def do_inode_stays(self) -> Any:
        path = self.path(fifo=False)
        before = os.stat(path)
        with open(path, "a") as file:
            file.write("more")
        return os.path.samestat(before, os.stat(path))

    def do_sendfile(self) -> Any:
        with open(self.path(fifo=False), "rb") as source, open(self.path(fifo=False), "r+b") as target:
            return os.sendfile(target.fileno(), source.fileno(), 1, 20)

    def do_copy_range(self) -> Any:
        with open(self.path(fifo=False), "rb") as source, open(self.path(fifo=False), "r+b") as target:
            return os.copy_file_range(source.fileno(), target.fileno(), 8, 0, 4)

    def do_map(self) -> Any:
        slot = self._slot(self.maps)
        write = self.draw.random() < 0.5
        with open(self.path(fifo=False), "r+b" if write else "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
        if self.maps[slot] is not None:
            self.maps[slot].close()
        self.maps[slot] = mapped
        return [len(mapped), mapped[:10]]

    def do_map_write(self) -> Any:
        mapped = self.maps[self._slot(self.maps)]
        if mapped is None or os.fstat(0) is None:
            raise LookupError("no map")
        mapped[:3] = b"MAP"
        mapped.flush()
        return mapped[:5]

    def do_map_read(self) -> Any:
        mapped = self.maps[self._slot(self.maps)]
        return None if mapped is None or mapped.size() == 0 else mapped.size()

    # Entries of folders ---------------------------------------------------------------------------------

    def do_rename(self) -> Any:
        return os.rename(self.path(fifo=False), self.path())

    do_rename_again = do_rename

    def do_replace(self) -> Any:
        return os.replace(self.path(fifo=False), self.path())

    def do_rename_folder(self) -> Any:
        return os.rename(self.draw.choice(("d", "w", "w/x", "d/e", "empty")), self.path())

    def do_rename_into_itself(self) -> Any:
        return os.rename("w", self.draw.choice(("w/x/y/in", "w/in", "w")))

    def do_renames(self) -> Any:
        return os.renames(self.path(fifo=False), self.path())

    def do_link(self) -> Any:
        return os.link(self.path(fifo=False), self.path())

    do_link_again = do_link

    def do_symlink(self) -> Any:
        target = self.draw.choice(
            ("a", "d", "../b", "nowhere", "w/x", os.path.join(self.folder, "d"), "link")
        )
        return os.symlink(target, self.path(fifo=False))

    def do_readlink(self) -> Any:
        return os.readlink(self.path())

    def do_remove(self) -> Any:
        return os.remove(self.path())

    do_unlink = do_remove

    def do_rmdir(self) -> Any:
        return os.rmdir(self.path())

    def do_removedirs(self) -> Any:
        return os.removedirs(self.path())

    def do_mkdir(self) -> Any:
        return os.mkdir(self.path(), self.draw.choice((0o777, 0o700)))

    do_mkdir_again = do_mkdir

    def do_makedirs(self) -> Any:
        return os.makedirs(self.path(), exist_ok=self.draw.random() < 0.5)

    def do_mkfifo(self) -> Any:
        return os.mkfifo(self.draw.choice(("f2", "d/f2", "missing/f", "d", "loop/f")))

    def do_listdir(self) -> Any:
        return sorted(os.listdir(self.path()), key=os.fsencode)

    do_listdir_again = do_listdir

    def do_scandir(self) -> Any:
        path = self.path()
        with os.scandir(path) as entries:
            rows = [
                [
                    each.name, each.path, each.is_dir(), each.is_file(), each.is_symlink(),
                    each.is_dir(follow_symlinks=False), each.stat(follow_symlinks=False),
                    each.inode() == os.lstat(os.path.join(os.fspath(path), each.name)).st_ino,
                ]
                for each in entries
            ]  # fmt: skip
        return sorted(rows, key=lambda row: os.fsencode(row[0]))

    def do_walk(self) -> Any:
        options = {"topdown": self.draw.random() < 0.5, "followlinks": False}
        rows = [
            [root, sorted(folders), sorted(files)] for root, folders, files in os.walk(self.name(), **options)
        ]
        return sorted(rows)

    def do_fwalk(self) -> Any:
        rows = os.fwalk(self.name(fifo=False))
        return sorted(
            [root, sorted(folders), sorted(files), os.fstat(fd).st_nlink] for root, folders, files, fd in rows
        )

    def do_glob(self) -> Any:
        return sorted(glob.glob(self.draw.choice(("*", "*/*", "d/*", "**/*", "?")), recursive=True))

    # Metadata -------------------------------------------------------------------------------------------

    def do_stat(self) -> Any:
        return os.stat(self.path())

    do_stat_again = do_stat

    def do_lstat(self) -> Any:
        return os.lstat(self.path())

    def do_chmod(self) -> Any:
        return os.chmod(self.path(), self.draw.choice((0o600, 0o644, 0o755, 0o444)))

    def do_utime(self) -> Any:
        return os.utime(
            self.path(), self.draw.choice(((OLD, OLD + 3), None)), follow_symlinks=self.draw.random() < 0.7
        )

    def do_chown(self) -> Any:
        return os.chown(self.path(), -1, os.getgid(), follow_symlinks=self.draw.random() < 0.5)

    def do_truncate(self) -> Any:
        return os.truncate(self.path(fifo=False), self.draw.choice((0, 3, 2000, -1)))

    def do_access(self) -> Any:
        path = self.path()
        return [os.access(path, how) for how in (os.F_OK, os.R_OK, os.W_OK, os.X_OK)]

    def do_tests(self) -> Any:
        path = self.path()
        found = [
            test(path)
            for test in (os.path.exists, os.path.lexists, os.path.isdir, os.path.isfile, os.path.islink)
        ]
        return [*found, os.path.getsize(path) if os.path.isfile(path) else None]

    def do_samefile(self) -> Any:
        return os.path.samefile(self.path(), self.path())

    def do_realpath(self) -> Any:
        return os.path.realpath(self.path())

    def do_chdir(self) -> Any:
        os.chdir(self.draw.choice((self.folder, self.folder, "..", "d", "w/x", "dl", "n2", "missing", "a")))
        return os.getcwd()

    do_go_back = do_chdir_back = lambda self: os.chdir(self.folder)

    def do_getcwd(self) -> Any:
        return [os.getcwd(), os.getcwdb(), str(Path.cwd())]

    # Relative to a folder's descriptor ------------------------------------------------------------------

    def do_open_folder(self) -> Any:
        slot = self._slot(self.folders)
        fd = os.open(self.path(), os.O_RDONLY | os.O_DIRECTORY)
        if self.folders[slot] is not None:
            os.close(self.folders[slot])
        self.folders[slot] = fd
        return sorted(os.listdir(fd))

    def do_in_folder(self) -> Any:
        fd, name = self._folder(), self.draw.choice(("a", "e", "f", "n3", "x", "e/f", "n3/n4"))
        how = self.noted(self.draw.randrange(12))
        if how == 0:
            with open(name, "a", opener=lambda path, flags: os.open(path, flags, dir_fd=fd)) as file:
                return file.write("in")
        if how == 1:
            return os.stat(name, dir_fd=fd)
        if how == 2:
            return os.mkdir(name, dir_fd=fd)
        if how == 3:
            return os.unlink(name, dir_fd=fd)
        if how == 4:
            return os.rename(name, "n3", src_dir_fd=fd, dst_dir_fd=fd)
        if how == 5:
            return os.symlink("a", name, dir_fd=fd)
        if how == 6:
            return os.link(name, "n5", src_dir_fd=fd, dst_dir_fd=fd)
        if how == 7:
            return sorted(os.listdir(fd))
        if how == 8:
            with os.scandir(fd) as entries:
                return sorted([each.name, each.path, each.is_dir()] for each in entries)
        if how == 9:
            return [os.chmod(name, 0o640, dir_fd=fd), os.utime(name, (OLD, OLD), dir_fd=fd)]
        if how == 10:
            return os.rmdir(name, dir_fd=fd)
        os.fchdir(fd)
        return os.getcwd()

    do_in_folder_again = do_in_folder

    # Libraries ------------------------------------------------------------------------------------------

    def do_copy(self) -> Any:
        copy = self.draw.choice((shutil.copy, shutil.copy2, shutil.copyfile))
        return copy(self.path(fifo=False), self.path(fifo=False))

    def do_copytree(self) -> Any:
        options = {"symlinks": self.draw.random() < 0.7, "dirs_exist_ok": self.draw.random() < 0.5}
        source = self.draw.choice(("d", "w/x", "empty", "a", "missing"))
        target = self.name()
        if os.path.realpath(target).startswith(os.path.realpath(source) + "/"):
            raise LookupError("a copy into itself depends on the order of entries")
        return shutil.copytree(source, target, **options)

    def do_move(self) -> Any:
        return shutil.move(self.name(fifo=False), self.name(fifo=False))

    def do_rmtree(self) -> Any:
        return shutil.rmtree(self.draw.choice(("d", "w/x", "n2", "new", "dl", "a", "missing", "d/e")))

    def do_tempfile(self) -> Any:
        file = tempfile.NamedTemporaryFile("w", dir=self.draw.choice((".", "d", "w/x")), delete=False)
        with file:
            file.write("temporary")
        try:
            return os.replace(file.name, self.path())
        finally:
            Path(file.name).unlink(missing_ok=True)

    def do_temporary(self) -> Any:
        with tempfile.TemporaryFile("w+", dir="d") as file, tempfile.TemporaryDirectory(dir=".") as folder:
            Path(folder, "x").write_text("x")
            return [file.write("abc"), file.seek(0), file.read(), os.listdir(folder)]

    def do_pathlib(self) -> Any:
        path, how = Path(self.name(fifo=False)), self.noted(self.draw.randrange(12))
        acts: tuple[Callable[[], Any], ...] = (
            path.touch, lambda: path.unlink(missing_ok=True), lambda: path.mkdir(parents=True, exist_ok=True),
            lambda: sorted(map(str, path.iterdir())), lambda: sorted(map(str, path.rglob("*"))),
            lambda: path.write_text(self.text()), path.read_bytes, lambda: str(path.resolve()),
            lambda: path.symlink_to("a"), lambda: path.hardlink_to("b"), path.stat, lambda: path.rename("n2"),
        )  # fmt: skip
        return acts[how]()

    do_pathlib_again = do_pathlib

    def do_database(self) -> Any:
        name = self.draw.choice(("x.db", "d/x.db", "missing/x.db"))
        with_uri = self.draw.random() < 0.3
        connection = sqlite3.connect("file:" + name if with_uri else name, uri=with_uri)
        try:
            rows = [
                connection.execute(f"pragma journal_mode={self.draw.choice(('wal', 'delete'))}").fetchall()
            ]
            connection.execute("create table if not exists t (x)")
            connection.execute("insert into t values (1)")
            connection.commit()
            beside = sorted(os.path.basename(path) for path in glob.glob(name + "*"))
            with sqlite3.connect(name) as reader:
                rows += [reader.execute("select count(*) from t").fetchall()]
            reader.close()
            return [*rows, beside]
        finally:
            connection.close()

    def do_in_fork(self) -> Any:
        path, text = self.path(fifo=False), self.text()
        child = os.fork()
        if child == 0:
            try:
                with open(path, "a") as file:
                    file.write(text)
                os.mkdir("made by a fork")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        with open(path, "rb") as file:
            return [file.read(), os.path.isdir("made by a fork")]


OPERATIONS = sorted(name[3:] for name in dir(Sequence) if name.startswith("do_"))


def run_for_real(folder: Path, seeds: list[int], operations: int) -> dict[int, list[Any]]:
    """In a fork, whose descriptors and current folder are its own."""
    return {seed: json.loads(_in_fork(lambda seed=seed: _one(folder, seed, operations))) for seed in seeds}


def _one(folder: Path, seed: int, operations: int) -> bytes:
    return json.dumps(Sequence(seed, operations, str(folder / str(seed))).run()).encode()


def _in_fork(function: Callable[[], bytes]) -> bytes:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pipe.write(function())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


def run_predicted(folder: Path, seeds: list[int], operations: int) -> dict[int, list[Any]]:
    """All in one prediction, each in a fork of it."""
    read, write = os.pipe()

    def program() -> None:
        torch.empty(4, device="cuda")
        for seed in seeds:
            answer = _in_fork(lambda seed=seed: _one(folder, seed, operations))
            os.write(write, len(answer).to_bytes(8, "little"))
            done = 0
            while done < len(answer):
                done += os.write(write, answer[done:])
        os.close(write)

    collected: list[bytes] = []
    import threading

    def collect() -> None:
        with os.fdopen(read, "rb") as pipe:
            collected.append(pipe.read())

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        oomph.predict(program)
    finally:
        os.close(write)
        thread.join()
    data, found = collected[0], {}
    for seed in seeds:
        size = int.from_bytes(data[:8], "little")
        found[seed] = json.loads(data[8 : 8 + size] or b"[]")
        data = data[8 + size :]
    return found


def compare(seeds: list[int], operations: int, where: str | None = None) -> list[str]:
    """A line for each sequence that differs: its first difference."""
    differences = []
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder, kept = Path(name, "tree"), Path(name, "real")
        for seed in seeds:
            (folder / str(seed)).mkdir(parents=True)
            fill(folder / str(seed))
        real = run_for_real(folder, seeds, operations)
        folder.rename(kept)
        for seed in seeds:
            (folder / str(seed)).mkdir(parents=True)
            fill(folder / str(seed))
        before = tree(str(folder))
        predicted = run_predicted(folder, seeds, operations)
        if tree(str(folder)) != before:
            differences.append("the folder has changed")
    for seed in seeds:
        pairs = zip(real[seed], predicted[seed], strict=False)
        found = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if found is None and len(real[seed]) != len(predicted[seed]):
            differences.append(f"seed {seed}: ended early")
        elif found is not None:
            expected, got = found
            differences.append(f"seed {seed}: {expected[0]}{expected[2]}: {_apart(expected[1], got[1])}")
    return differences


def _apart(expected: Any, got: Any) -> str:
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got) > 0:
        index = next((i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]), 0)
        if isinstance(expected[index], list):
            return f"[{index}] " + _apart(expected[index], got[index])
    missing = (
        [each for each in expected if each not in got]
        if isinstance(expected, list) and isinstance(got, list)
        else ""
    )
    return f"expected {str(expected)[:300]}, got {str(got)[:300]}" + (
        f"; lacks {str(missing)[:200]}" if missing else ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument("--operations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to make the folders; default: TMPDIR")
    arguments = parser.parse_args()
    seeds = list(range(arguments.seed, arguments.seed + arguments.sequences))
    differences = compare(seeds, arguments.operations, arguments.folder)
    print(*differences, sep="\n")
    print(f"{arguments.sequences - len(differences)} of {arguments.sequences} sequences are the same")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
