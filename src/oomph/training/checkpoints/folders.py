"""Folders that appear and disappear whole: written or deleted under another name, one rename in between."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

_CHECKPOINT = re.compile(r"step-([0-9]{8,})(?:-([0-9]+))?")
_LEFTOVER = re.compile(r"\.(?:saving|deleting)-.*\.([0-9]+)")


def named(folder: Path) -> list[tuple[int, Path]]:
    """Whatever is called like a checkpoint, with its step, oldest first; of one step, the last one last."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = _CHECKPOINT.fullmatch(path.name)
            if match is not None:
                found.append((int(match[1]), int(match[2] or 1), path))
    return [(step, path) for step, _, path in sorted(found)]


def create(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """A checkpoint's folder, complete and on disk, or not at all."""
    partial = folder / f".saving-step-{step:08d}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        write(partial)
        sync(partial)
        final = _free_name(folder, step)
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder)
    return final


def delete(path: Path) -> None:
    """Renamed first, so that what is half deleted is never taken for a checkpoint."""
    doomed = path.with_name(f".deleting-{path.name}.{os.getpid()}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def clean(folder: Path) -> list[Path]:
    """Delete what writers left that are no longer alive; returns what it was."""
    left = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = _LEFTOVER.fullmatch(path.name)
            if match is not None and not _is_at_work(int(match[1]), path):
                shutil.rmtree(path, ignore_errors=True)
                left.append(path)
    return left


def sync(folder: Path) -> None:
    """The names in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_name(folder: Path, step: int) -> Path:
    """A step saved before, by a run that was resumed from further back, gets a second folder: to replace the
    first one would leave a moment with neither."""
    taken = [path for found, path in named(folder) if found == step]
    if not taken:
        return folder / f"step-{step:08d}"
    last = _CHECKPOINT.fullmatch(taken[-1].name)
    assert last is not None
    return folder / f"step-{step:08d}-{int(last[2] or 1) + 1}"


def _is_at_work(pid: int, path: Path) -> bool:
    """Whether the process that left `path` may still be writing it. A number is used again by and by, always
    so in containers: what is older than the process of that number was left by another."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    started = _started(pid)
    try:
        return started is None or path.stat().st_mtime >= started - 1
    except OSError:
        return False


def _started(pid: int) -> float | None:
    """When a process began, in seconds since 1970; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
