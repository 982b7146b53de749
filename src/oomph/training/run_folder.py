"""The folder of a run: whether there is one, whose it is, and that one run at a time works in it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomph.errors import UserError

if TYPE_CHECKING:
    from oomph.training.config import TrainConfig

CONFIG, LOCK, METRICS, CHECKPOINTS = "config.yaml", "lock", "metrics.jsonl", "checkpoints"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
# What may be given anew when a run goes on: where it ends (which a schedule follows) and what it tells.
_FREE = {
    ("output", "dir"),
    *(("training", key) for key in ("steps", "epochs", "eval_every", "eval_at_start", "eval_batches")),
    *(("training", key) for key in ("save_every", "save", "keep", "log_every", "device", "on_nan")),
    *(("training", key) for key in ("memory_limit", "deterministic")),
    ("data", "workers"),
}


def folder_of(config: TrainConfig) -> Path:
    return Path(config.output.dir or Path("runs") / config.name).expanduser()


def is_run(folder: Path) -> bool:
    """A config.yaml may be anybody's, and so may a folder of checkpoints."""
    return (folder / CONFIG).exists() and any((folder / name).is_file() for name in (LOCK, METRICS))


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    """A new run never writes over an old one; a resumed one is the run that it goes on with."""
    try:
        if is_run(folder):
            _check_is_the_same(config, folder, resume)
        else:
            _check_is_free(folder, resume)
    except OSError as problem:  # a name that is too long, a folder that may not be looked into
        raise UserError(f"cannot use {folder}: {problem.strerror}; give another output.dir") from None


def _check_is_the_same(config: TrainConfig, folder: Path, resume: bool) -> None:
    if not resume:
        raise UserError(f"{folder} holds a run already; go on with --resume, or give another output.dir")
    different = _differences(read_config(folder, config.name).to_dict(), config.to_dict())
    if different:
        raise UserError(
            f"the run in {folder} was begun with another config: {'; '.join(different)}; "
            f"go on with its own, `oomph train {folder / CONFIG} --resume`, or give another output.dir"
        )


def _check_is_free(folder: Path, resume: bool) -> None:
    if (folder / CONFIG).exists():
        raise UserError(
            f"{folder / CONFIG} is not of a run, and a run would write its own there; give another output.dir"
        )
    if (folder / CHECKPOINTS).exists():
        raise UserError(
            f"{folder} holds checkpoints, and no {CONFIG} that says of what; give another output.dir"
        )
    if resume:
        raise UserError(f"{folder} holds no run to resume; leave --resume out, or give output.dir")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    found = []
    for key in {**old, **new}:
        here = (*path, key)
        then, now = old.get(key), new.get(key)
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            found += _differences(then, now, here)
        elif then != now and here not in _FREE:
            found.append(f"{'.'.join(here)} was {then!r} and is {now!r}")
    return found


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two runs in one folder would delete each other's checkpoints.

    The lock is the process's: it ends with it, however that ends, and a worker that reads data has none."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("w")
    except OSError as problem:
        raise UserError(f"cannot write in {folder}: {problem.strerror}; give another output.dir") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another run is at work in {folder}; wait for it, or give another output.dir"
            ) from None
        yield


@contextmanager
def one_line_of_the_disk(folder: Path) -> Iterator[None]:
    """A disk that is full, read-only or broken is the user's to mend; other errors are as they are."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in _DISK:
            raise
        place = problem.filename or folder
        advice = "; make room there, or give another output.dir" if problem.errno in _FULL else ""
        raise UserError(f"the run in {folder} ended: {problem.strerror} ({place}){advice}") from problem


def read_config(folder: Path, name: str) -> TrainConfig:
    from oomph.training.config import load_dict
    from oomph.training.config.reading import read_mapping

    path = folder / CONFIG
    return load_dict(read_mapping(path), name, source=str(path))


def write_config(config: TrainConfig, folder: Path) -> None:
    from oomph.training.config.reading import as_yaml

    path = folder / CONFIG
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(as_yaml(config.to_dict()), encoding="utf-8")
    os.replace(unfinished, path)
