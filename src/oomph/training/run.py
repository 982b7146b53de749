"""A run: a config, a folder, and what is in it. New, or resumed where it was."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from oomph.errors import UserError
from oomph.training.checkpoints import export
from oomph.training.config import TrainConfig, load_dict
from oomph.training.data import open_data
from oomph.training.loop.failures import OutOfMemory
from oomph.training.loop.listener import Listener, Silent
from oomph.training.loop.memory import limit_memory
from oomph.training.loop.trainer import Outcome, Trainer
from oomph.training.workloads import workload
from oomph.units import parse_bytes
from oomph.workload import set_allocator

CONFIG, LOCK = "config.yaml", "lock"
# What may be given anew when a run goes on: where it ends (which a schedule follows) and what it tells.
_FREE = {
    ("output", "dir"),
    *(("training", key) for key in ("steps", "epochs", "eval_every", "eval_at_start", "eval_batches")),
    *(("training", key) for key in ("save_every", "save", "keep", "log_every", "device", "on_nan")),
    ("training", "memory_limit"),
    ("data", "workers"),
}


def folder_of(config: TrainConfig) -> Path:
    return Path(config.output.dir or Path("runs") / config.name)


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    listener: Listener | None = None,
    export_to: str | None = None,
) -> Outcome:
    """Train as the config says. `resume`: go on with the newest checkpoint of its folder."""
    listener = Silent() if listener is None else listener
    folder = folder_of(config)
    check_folder(config, folder, resume)
    if export_to is not None:
        _check_export(export_to)
    _check_model(config)
    with alone_in(folder):
        check_folder(config, folder, resume)  # another run may have begun and ended since
        return _train(config, folder, resume, listener, export_to)


def _check_model(config: TrainConfig) -> None:
    """What the model or its fixes refuse is told before data are read and a folder is made."""
    with torch.device("meta"):
        workload(config).make_model(lambda made: made)


def _train(
    config: TrainConfig, folder: Path, resume: bool, listener: Listener, export_to: str | None
) -> Outcome:
    device = device_of(config)
    _seed(config.training.seed)
    if config.training.memory_limit is not None and device.type == "cuda":
        limit_memory(parse_bytes(config.training.memory_limit), device)
    work = workload(config)
    if work.allocator is not None and device.type == "cuda":
        set_allocator(work.allocator)
    data = open_data(config, folder, workers=int(device.type == "cuda"))
    listener.said(data.describe())
    if config.training.steps is None and config.training.schedule != "constant":
        listener.said(
            f"training.schedule={config.training.schedule}: with epochs the last step is not known, so the "
            "learning rate stays where the warm-up ends; give training.steps for a schedule"
        )
    try:
        trainer = Trainer(config, work, data, folder, device, listener)
        step = trainer.resume() if resume else None
    except torch.OutOfMemoryError as error:
        why = "there is no room for the model and its optimizer's state; no step was made"
        raise OutOfMemory(str(error), [], None, why) from error
    if resume:
        listener.said("no checkpoint yet: from the start" if step is None else f"resumed at step {step}")
    if step is not None:
        _check_steps_left(config, folder, step, listener)
    _write_config(config, folder)
    try:
        outcome = trainer.run()
    finally:
        data.train.close()
    if export_to is not None:
        export(trainer.model.state_dict(), export_to, {"config": config.name, "step": str(outcome.step)})
        listener.said(f"weights are in {export_to}")
    return outcome


def _check_steps_left(config: TrainConfig, folder: Path, step: int, listener: Listener) -> None:
    """A resumed run that has nothing to do says so."""
    steps = config.training.steps
    if steps is None or step < steps:
        return
    if step == steps:
        listener.said(f"the run is complete at step {step}; give training.steps=... to go on")
        return
    begun = _read_config(folder / CONFIG, config.name).training.steps
    raise UserError(
        f"the run in {folder} is at step {step}, and training.steps is {steps} (the run's own was {begun}); "
        "give training.steps=N with more"
    )


def _check_export(file: str) -> None:
    """Told before the training, not after it."""
    path = Path(file)
    if path.exists():
        raise UserError(f"--export {file!r} exists already; give another name")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--export {file!r}: the folder {str(path.parent)!r} does not exist")


def _seed(seed: int) -> None:
    """Every generator whose state a checkpoint holds."""
    torch.manual_seed(seed)
    random.seed(seed)
    with suppress(ImportError):
        import numpy as np

        np.random.seed(seed % 2**32)


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


def device_of(config: TrainConfig) -> torch.device:
    name = config.training.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"training.device={name!r} is not a device; give cpu, cuda or cuda:0") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"training.device={name!r}: torch sees no GPU; give cpu, or leave it out")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    """A new run never writes over an old one; a resumed one is the run that it goes on with."""
    begun = folder / CONFIG
    if not begun.exists():
        if (folder / "checkpoints").exists():
            raise UserError(
                f"{folder} holds checkpoints, and no {CONFIG} that says of what; give another output.dir"
            )
        if resume:
            raise UserError(f"{folder} holds no run to resume; leave --resume out, or give output.dir")
        return
    if not resume:
        raise UserError(f"{folder} holds a run already; go on with --resume, or give another output.dir")
    different = _differences(_read_config(begun, config.name).to_dict(), config.to_dict())
    if different:
        raise UserError(
            f"the run in {folder} was begun with another config: {'; '.join(different)}; "
            "resume with that one, or give another output.dir"
        )


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


def _read_config(path: Path, name: str) -> TrainConfig:
    from oomph.training.config.reading import read_mapping

    return load_dict(read_mapping(path), name, source=str(path))


def _write_config(config: TrainConfig, folder: Path) -> None:
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False), encoding="utf-8")
    os.replace(unfinished, path)
