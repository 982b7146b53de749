# ruff: noqa: E501, SIM115
"""What a predicted program changes of the user's files and memory: nothing.

    python -m benchmarks.routes_files

Each route runs in a prediction, in a fork and a folder of its own: with all protections, and with those that a
kernel or a container can lack imitated absent. It is harm if the content, the metadata or the names of the
folder, a file in /dev/shm or memory of the caller has changed. Harm is permitted only where a warning came
first. Of routes of Python ("works") it is also checked that they do not fail. Written to results/routes_files.csv.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import sqlite3
import stat
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import torch

import oomph
from benchmarks import ROOT, rows

RESULTS = ROOT / "benchmarks" / "results" / "routes_files.csv"
IMITATE = "OOMPH_WITHOUT"  # of the environment: see oomph.prediction.sandbox
ABSENT = ("", "landlock", "seccomp", "landlock seccomp")
OLD = 1_500_000_000
HEADER = """
import ctypes, io, logging, mmap, multiprocessing, os, pathlib, posix, shutil, sqlite3, subprocess, sys, tempfile, zipfile
import numpy as np, torch
from pathlib import Path
libc = ctypes.CDLL(None, use_errno=True)
def c(name, *arguments):
    ctypes.set_errno(0)
    answer = getattr(libc, name)(*arguments)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer
def call(name, *arguments):
    numbers = {"x86_64": {"openat": 257, "unlinkat": 263, "fchmodat": 268, "utimensat": 280, "renameat2": 316, "truncate": 76},
               "aarch64": {"openat": 56, "unlinkat": 35, "fchmodat": 53, "utimensat": 88, "renameat2": 276, "truncate": 45}}
    return c("syscall", numbers[os.uname().machine][name], *arguments)
"""
# Through Python: works in the overlay.
PYTHON = {
    "open w": "open('f.txt', 'w').write('x'); assert open('f.txt').read() == 'x'",
    "open a": "open('f.txt', 'a').write('x')",
    "open r+": "f = open('f.txt', 'r+'); f.write('x'); f.close()",
    "open x": "open('new', 'x').write('x')",
    "open with opener": "open('f.txt', 'w', opener=lambda p, flags: os.open(p, flags)).write('x')",
    "open of a Path": "f = open(Path('f.txt'), 'w'); assert f.name == 'f.txt'",
    "io.open": "io.open('f.txt', 'wb').write(b'x')",
    "io.FileIO": "io.FileIO('f.txt', 'w').write(b'x'); assert open('f.txt').read() == 'x'",
    "os.open O_TRUNC": "os.close(os.open('f.txt', os.O_RDWR | os.O_TRUNC)); assert os.path.getsize('f.txt') == 0",
    "os.open of /proc/self/fd": "fd = os.open('f.txt', os.O_RDONLY); f = open(f'/proc/self/fd/{fd}', 'w'); f.write('x'); f.close(); assert os.read(fd, 9) == b'x'",
    "os.open O_TMPFILE": "fd = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(fd, b'x')",
    "dir_fd": "d = os.open('d', os.O_RDONLY); os.unlink('a', dir_fd=d); os.mkdir('n', dir_fd=d); assert not os.path.exists('d/a')",
    "fchdir": "d = os.open('d', os.O_RDONLY); os.fchdir(d); open('a', 'w').close()",
    "truncate": "os.truncate('f.txt', 2); assert os.path.getsize('f.txt') == 2",
    "remove": "os.remove('f.txt'); assert not os.path.exists('f.txt')",
    "rmtree": "shutil.rmtree('d'); assert not os.path.exists('d')",
    "rename": "os.rename('f.txt', 'd/g'); assert os.path.exists('d/g')",
    "rename a folder": "os.rename('d', 'e'); open('e/a', 'a').write('x'); assert open('e/a').read().endswith('x')",
    "replace": "open('t', 'w').write('x'); os.replace('t', 'f.txt')",
    "link": "os.link('f.txt', 'g'); open('g', 'a').write('x'); assert open('f.txt').read().endswith('x')",
    "symlink": "os.symlink('f.txt', 'g'); open('g', 'a').write('x'); assert open('f.txt').read().endswith('x')",
    "mkdir": "os.makedirs('x/y'); os.rmdir('x/y')",
    "mkfifo": "os.mkfifo('p'); assert os.path.exists('p')",
    "mknod": "os.mknod('p'); assert os.path.exists('p')",
    "chmod": "os.chmod('f.txt', 0o600); assert os.stat('f.txt').st_mode & 0o777 == 0o600",
    "fchmod of a reader": "f = open('f.txt'); os.fchmod(f.fileno(), 0o600); assert os.fstat(f.fileno()).st_mode & 0o777 == 0o600",
    "chown": "os.chown('f.txt', -1, os.getgid()); f = open('f.txt'); os.fchown(f.fileno(), -1, os.getgid())",
    "utime": "os.utime('f.txt', (1, 1)); assert os.stat('f.txt').st_mtime == 1",
    "utime of a reader": "f = open('f.txt'); os.utime(f.fileno(), (1, 1)); assert os.stat('f.txt').st_mtime == 1",
    "setxattr": "try: os.setxattr('f.txt', 'user.a', b'x')\nexcept OSError: pass",
    "pathlib": "Path('f.txt').write_text('x'); Path('g').touch(); Path('d/a').unlink()",
    "shutil.copy": "shutil.copy2('d/a', 'f.txt'); shutil.copytree('d', 'e'); shutil.move('d', 'h')",
    "tempfile": "f = tempfile.NamedTemporaryFile(dir='.', delete=False); f.write(b'x'); f.close(); os.replace(f.name, 'f.txt')",
    "mmap": "f = open('f.txt', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[:1] = b'x'; m.flush(); assert open('f.txt').read(1) == 'x'",
    "sendfile": "f, g = open('f.txt', 'r+b'), open('d/a', 'rb'); os.sendfile(f.fileno(), g.fileno(), 0, 3)",
    "copy_file_range": "f, g = open('f.txt', 'r+b'), open('d/a', 'rb'); os.copy_file_range(g.fileno(), f.fileno(), 3)",
    "logging": "h = logging.FileHandler('f.txt'); h.emit(logging.makeLogRecord({'msg': 'x'})); h.close()",
    "zipfile": "z = zipfile.ZipFile('z.zip', 'w'); z.writestr('a', 'b'); z.close()",
    "numpy": "np.save('n.npy', np.ones(3)); np.ones(3).tofile('f.txt'); np.savetxt('t', np.ones(3))",
    "memmap": "m = np.memmap('n.npy', mode='r+', dtype='u1'); m[:] = 7; m.flush(); assert open('n.npy', 'rb').read(1) == b'\\7'",
    "torch.save": "torch.save({'a': torch.ones(3)}, 'f.txt')",
    "torch.jit.save": "torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), 'f.txt'); assert os.path.getsize('f.txt')",
    "torch.from_file": "t = torch.from_file('n.npy', shared=True, size=4); t.numpy()[:] = 1",
    "storage from_file": "s = torch.UntypedStorage.from_file('n.npy', True, 16); s[0] = 1",
    "sqlite": "c_ = sqlite3.connect('g.db'); c_.execute('insert into t values (2)'); c_.commit(); c_.close()",
    "sqlite WAL": "c_ = sqlite3.connect('g.db'); c_.execute('pragma journal_mode=wal'); c_.execute('insert into t values (2)'); c_.commit(); assert os.path.exists('g.db-wal')",
    "sqlite uri": "c_ = sqlite3.connect('file:g.db?mode=rw', uri=True); c_.execute('insert into t values (2)'); c_.commit()",
    "sqlite Connection": "c_ = sqlite3.Connection('g.db'); c_.execute('insert into t values (2)'); c_.commit()",
    "sqlite ATTACH": "c_ = sqlite3.connect(':memory:'); c_.execute(\"attach database 'g.db' as g\"); c_.execute('insert into g.t values (2)'); c_.commit()",
    "sqlite ATTACH of a parameter": "c_ = sqlite3.connect(':memory:'); c_.cursor().execute('attach ? as g', ('g.db',)); c_.execute('insert into g.t values (2)'); c_.commit()",
    "a file in /dev/shm": "open(SHM, 'r+b').write(b'x'); os.truncate(SHM, 3); assert os.path.getsize(SHM) == 3",
    "removal in /dev/shm": "os.remove(SHM); assert not os.path.exists(SHM)",
    "SharedMemory by name": "from multiprocessing.shared_memory import SharedMemory\ns = SharedMemory(os.path.basename(SHM)); s.buf[:1] = b'x'; s.unlink()",
    "in a fork": "p = os.fork() or (open('f.txt', 'w').write('x'), os._exit(0)); os.waitpid(p, 0); assert open('f.txt').read() == 'x'",
    "in a process": "p = multiprocessing.get_context('fork').Process(target=lambda: open('f.txt', 'w').write('x')); p.start(); p.join(); assert open('f.txt').read() == 'x'",
    "parquet": "import pyarrow, pyarrow.parquet\ntry: pyarrow.parquet.write_table(pyarrow.table({'a': [1]}), 'f.txt')\nexcept OSError: pass",
}
# Below Python's functions: refused, by the kernel or before.
BELOW = {
    "posix.unlink": "posix.unlink('f.txt')",
    "posix.open": "posix.write(posix.open('f.txt', os.O_WRONLY), b'x')",
    "posix.rename": "posix.rename('f.txt', 'g')",
    "posix.chmod": "posix.chmod('f.txt', 0)",
    "posix.fchmod": "f = open('f.txt'); posix.fchmod(f.fileno(), 0)",
    "posix.utime": "posix.utime('f.txt', (1, 1))",
    "posix.mkdir": "posix.mkdir('new')",
    "posix.symlink": "posix.symlink('a', 'new')",
    "posix.link": "posix.link('f.txt', 'new')",
    "posix.truncate": "posix.truncate('f.txt', 0)",
    "posix.setxattr": "posix.setxattr('f.txt', 'user.a', b'x')",
    "a subclass of sqlite's Connection": "sqlite3.dbapi2.Connection.__mro__[2]('g.db').execute('delete from t').connection.commit()",
    "fopen, C": "libc.fopen.restype = ctypes.c_void_p; libc.fopen(b'f.txt', b'w')",
    "open, C": "c('write', c('open', b'f.txt', os.O_WRONLY), b'x', 1)",
    "open O_TRUNC, C": "c('open', b'f.txt', os.O_RDWR | os.O_TRUNC)",
    "creat, C": "c('creat', b'new', 0o644)",
    "openat, system call": "call('openat', -100, b'f.txt', os.O_WRONLY | os.O_TRUNC, 0)",
    "unlink, C": "c('unlink', b'f.txt')",
    "unlinkat, system call": "call('unlinkat', -100, b'f.txt', 0)",
    "rename, C": "c('rename', b'f.txt', b'g')",
    "renameat2, system call": "call('renameat2', -100, b'f.txt', -100, b'g', 0)",
    "link, C": "c('link', b'f.txt', b'g')",
    "symlink, C": "c('symlink', b'f.txt', b'g')",
    "mkdir, C": "c('mkdir', b'new', 0o755)",
    "rmdir, C": "c('rmdir', b'empty')",
    "mkfifo, C": "c('mkfifo', b'new', 0o644)",
    "truncate, C": "c('truncate', b'f.txt', ctypes.c_long(0))",
    "chmod, C": "c('chmod', b'f.txt', 0)",
    "fchmod, C": "f = open('f.txt'); c('fchmod', f.fileno(), 0)",
    "fchmodat, system call": "call('fchmodat', -100, b'f.txt', 0)",
    "chown, C": "c('chown', b'f.txt', 1, 1)",
    "utimes, C": "c('utimes', b'f.txt', None)",
    "futimens, C": "f = open('f.txt'); c('futimens', f.fileno(), None)",
    "utimensat, system call": "call('utimensat', -100, b'f.txt', None, 0)",
    "setxattr, C": "c('setxattr', b'f.txt', b'user.a', b'x', 1, 0)",
    "fsetxattr, C": "f = open('f.txt'); c('fsetxattr', f.fileno(), b'user.a', b'x', 1, 0)",
    "truncate in /dev/shm, C": "c('truncate', SHM.encode(), ctypes.c_long(0))",
    "open in /dev/shm, C": "c('open', SHM.encode(), os.O_RDWR | os.O_TRUNC)",
    "shm_open, C": "c('shm_open', b'/' + os.path.basename(SHM).encode(), os.O_RDWR | os.O_TRUNC, 0o600)",
    "shm_unlink, C": "c('shm_unlink', b'/' + os.path.basename(SHM).encode())",
    "safetensors.numpy": "import safetensors.numpy; safetensors.numpy.save_file({'a': np.ones(3)}, 'f.txt')",
    "cp": "subprocess.run(['cp', 'd/a', 'f.txt'])",
}
# What the caller has made.
MEMORY = {
    "memmap of the caller": "MEMMAP[:] = 1; MEMMAP.flush()",
    "mmap of the caller": "MMAP[:3] = b'xyz'; MMAP.flush()",
    "anonymous memory of the caller": "ANONYMOUS[:3] = b'xyz'",
    "shared tensor of the caller": "TENSOR.numpy()[:] = 1",
    "mp.Array of the caller": "ARRAY[0] = 7",
    "mp.Value of the caller": "VALUE.value = 7",
    "mp.Lock of the caller": "LOCK.acquire()",
    "mp.Semaphore of the caller": "SEMAPHORE.acquire()",
    "mp.Event of the caller": "EVENT.set()",
    "SharedMemory of the caller": "SHARED.buf[:3] = b'xyz'",
    "from_file of the caller": "FROM_FILE.numpy()[:] = 1",
    "file of the caller": "FILE.write('x'); FILE.flush()",
    "temporary file of the caller": "TEMPORARY.write(b'x'); TEMPORARY.flush()",
}  # fmt: skip
ROUTES = {"works": PYTHON, "refused": BELOW, "memory": MEMORY}


@dataclass
class Row:
    route: str
    kind: str
    absent: str  # protections
    changed: bool
    warned: bool
    outcome: str  # "", or the error of the program
    ok: bool


def fill(folder: Path) -> None:
    (folder / "d").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "f.txt").write_text("one line\n")
    (folder / "d/a").write_text("another\n")
    (folder / "n.npy").write_bytes(bytes(64))
    database = sqlite3.connect(folder / "g.db")
    database.execute("create table t (x)")
    database.commit()
    database.close()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (OLD, OLD))


def state(folder: Path, in_memory: Path) -> list[Any]:
    """All of a folder and of a file in /dev/shm that a program could change."""
    found: list[Any] = []
    for path in (*sorted(folder.rglob("*")), folder, in_memory):
        if not os.path.lexists(path):
            found.append((str(path), "missing"))
            continue
        seen = os.lstat(path)
        content = path.read_bytes() if stat.S_ISREG(seen.st_mode) else b""
        attributes = os.listxattr(path, follow_symlinks=False)
        found.append(
            (
                str(path),
                seen.st_mode,
                seen.st_uid,
                seen.st_gid,
                seen.st_nlink,
                seen.st_mtime_ns,
                content,
                attributes,
            )
        )
    return found


class Caller:
    """Memory and files that the caller of a prediction has made, and whether they are as they were."""

    def __init__(self, folder: Path) -> None:
        np.zeros(50, "f4").tofile(folder / "memmap")
        np.zeros(50, "f4").tofile(folder / "torch")
        (folder / "mmap").write_bytes(bytes(4096))
        with (folder / "mmap").open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 4096)
        self.folder = folder
        self.names: dict[str, Any] = {
            "MEMMAP": np.memmap(folder / "memmap", "f4", "r+"),
            "MMAP": mapped,
            "ANONYMOUS": mmap.mmap(-1, 8192),
            "TENSOR": torch.zeros(64).share_memory_(),
            "ARRAY": multiprocessing.Array("i", 4),
            "VALUE": multiprocessing.Value("i", 0),
            "LOCK": multiprocessing.Lock(),
            "SEMAPHORE": multiprocessing.Semaphore(1),
            "EVENT": multiprocessing.Event(),
            "SHARED": SharedMemory(create=True, size=64),
            "FROM_FILE": torch.from_file(str(folder / "torch"), shared=True, size=50),
            "FILE": (folder / "file").open("w"),
            "TEMPORARY": tempfile.TemporaryFile(dir=folder),
        }

    def state(self) -> list[Any]:
        n = self.names
        free = [n["LOCK"].acquire(block=False), n["SEMAPHORE"].acquire(block=False)]
        for is_free, name in zip(free, ("LOCK", "SEMAPHORE"), strict=True):
            if is_free:
                n[name].release()
        return [
            *(float(n["MEMMAP"].sum()), n["MMAP"][:3], n["ANONYMOUS"][:3], float(n["TENSOR"].sum())),
            *(n["ARRAY"][0], n["VALUE"].value, free, n["EVENT"].is_set(), bytes(n["SHARED"].buf[:3])),
            *(float(n["FROM_FILE"].sum()), os.fstat(n["FILE"].fileno()).st_size, os.fstat(n["TEMPORARY"].fileno()).st_size),
            *((self.folder / name).read_bytes() for name in ("memmap", "torch", "mmap", "file")),
        ]  # fmt: skip

    def close(self) -> None:
        self.names["SHARED"].close()
        self.names["SHARED"].unlink()
        self.names["FILE"].close()
        self.names["TEMPORARY"].close()


def _run(body: str, folder: Path, names: dict[str, Any]) -> str:
    """The error of a route, in a fork."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            os.chdir(folder)
            exec(HEADER + body, dict(names))
        except BaseException as raised:
            error = repr(raised)[:200]
        os.write(write, error.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def run(absent: str, kinds: dict[str, dict[str, str]]) -> list[Row]:
    """All routes in one prediction."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        caller_folder = root / "caller"
        caller_folder.mkdir()
        caller = Caller(caller_folder)
        places = {}
        for index, route in enumerate(route for routes in kinds.values() for route in routes):
            folder, in_memory = root / str(index), Path(f"/dev/shm/oomph-route-{os.getpid()}-{index}")
            fill(folder)
            in_memory.write_bytes(bytes(64))
            os.utime(in_memory, (OLD, OLD))
            places[route] = folder, in_memory
        before = {route: state(*place) for route, place in places.items()}
        memory_before = {route: caller.state() for route in kinds.get("memory", {})}
        read, write = os.pipe()

        def program() -> None:
            torch.empty(4, device="cuda")
            for kind, routes in kinds.items():
                for route, body in routes.items():
                    folder, in_memory = places[route]
                    names = {"SHM": str(in_memory), **(caller.names if kind == "memory" else {})}
                    os.write(write, json.dumps((route, _run(body, folder, names))).encode() + b"\n")

        try:
            if absent:
                os.environ[IMITATE] = absent
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                oomph.predict(program)
        finally:
            os.environ.pop(IMITATE, None)
            os.close(write)
        with os.fdopen(read) as pipe:
            outcomes = dict(json.loads(line) for line in pipe)
        warned = any("protect" in str(each.message) or "kernel" in str(each.message) for each in caught)
        for kind, routes in kinds.items():
            for route in routes:
                changed = state(*places[route]) != before[route]
                if kind == "memory":
                    changed = changed or caller.state() != memory_before[route]
                ok = (not changed or warned) and (kind == "refused" or not outcomes[route])
                found.append(Row(route, kind, absent, changed, warned, outcomes[route], ok))
                places[route][1].unlink(missing_ok=True)
        caller.close()
    return found


def main() -> int:
    revision = rows.revision()
    found = [row for absent in ABSENT for row in run(absent, ROUTES)]
    rows.write(RESULTS, [asdict(row) | revision for row in found])
    print(f"{'without':18} {'routes':>6} {'changed':>8} {'warned first':>13} {'failed':>7}")
    for absent in ABSENT:
        of = [row for row in found if row.absent == absent]
        changed = [row for row in of if row.changed]
        warned = sum(row.warned for row in changed)
        failed = sum(not row.ok for row in of)
        print(f"{absent or '(all protections)':18} {len(of):6} {len(changed):8} {warned:13} {failed:7}")
    for row in found:
        if not row.ok:
            print(
                f"not ok: {row.route} without {row.absent or 'nothing'}: changed {row.changed}, {row.outcome}"
            )
        elif row.changed:
            print(f"warned: {row.route} without {row.absent}")
    return 0 if all(row.ok for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
