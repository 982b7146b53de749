"""The folder of a run: its config, its lock, and whether a run may write there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oomph.errors import UserError
from oomph.training.config import TrainConfig, load_dict
from oomph.training.config.reading import RUN_CONFIG, RUN_LOCK, is_run, read_mapping, to_yaml

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
# What may change when a run is resumed: where it ends (which a schedule follows) and what it reports.
_MAY_CHANGE = {
    ("output", "dir"),
    ("data", "workers"),
    *(("training", key) for key in ("steps", "epochs", "eval_every", "eval_at_start", "eval_batches")),
    *(("training", key) for key in ("save_every", "save", "keep", "log_every", "device", "on_nan")),
    *(("training", key) for key in ("memory_limit", "deterministic")),
}


def folder_of(config: TrainConfig) -> Path:
    return Path(config.output.dir or Path("runs") / config.name).expanduser()


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    """A new run never overwrites an old one; a resumed run has the config it was started with."""
    try:
        if is_run(folder):
            _check_is_the_same(config, folder, resume)
        else:
            _check_is_unused(folder, resume)
    except OSError as error:  # a name that is too long, a folder without permission
        raise UserError(f"cannot use {folder}: {error.strerror}; give another output.dir") from None


def _check_is_the_same(config: TrainConfig, folder: Path, resume: bool) -> None:
    if not resume:
        raise UserError(f"{folder} holds a run already; continue with --resume, or give another output.dir")
    different = _differences(read_config(folder, config.name).to_dict(), config.to_dict())
    if different:
        raise UserError(
            f"the run in {folder} was started with another config: {'; '.join(different)}; continue with its "
            f"own, `oomph train {folder / RUN_CONFIG} --resume`, or give another output.dir"
        )


def _check_is_unused(folder: Path, resume: bool) -> None:
    if (folder / RUN_CONFIG).exists():
        raise UserError(
            f"{folder / RUN_CONFIG} is not of a run, and a run would overwrite it; give another output.dir"
        )
    if (folder / "checkpoints").exists():
        raise UserError(f"{folder} holds checkpoints, and no {RUN_CONFIG}; give another output.dir")
    if resume:
        raise UserError(f"{folder} holds no run to resume; leave --resume out, or give output.dir")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    found = []
    for key in {**old, **new}:
        key_path = (*path, key)
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            found += _differences(before, now, key_path)
        elif before != now and key_path not in _MAY_CHANGE:
            found.append(f"{'.'.join(key_path)} was {before!r} and is {now!r}")
    return found


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """One run at a time: two would delete each other's checkpoints.

    The lock belongs to the process and ends with it, however that ends; a forked worker does not hold it."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / RUN_LOCK).open("w")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}; give another output.dir") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"another run is using {folder}; wait for it, or give another output.dir"
            ) from None
        yield


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """One line for a disk that is full, read-only or broken; other errors are raised as they are."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = error.filename or folder
        advice = "; make room there, or give another output.dir" if error.errno in _FULL else ""
        raise UserError(f"the run in {folder} ended: {error.strerror} ({where}){advice}") from error


def read_config(folder: Path, name: str) -> TrainConfig:
    path = folder / RUN_CONFIG
    return load_dict(read_mapping(path), name, source=str(path))


def write_config(config: TrainConfig, folder: Path) -> None:
    path = folder / RUN_CONFIG
    partial = path.with_suffix(".partial")
    partial.write_text(to_yaml(config.to_dict()), encoding="utf-8")
    os.replace(partial, path)
