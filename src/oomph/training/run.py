"""`train(config)`: a new run in its folder, or one that is resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from oomph.deterministic import deterministic_algorithms
from oomph.errors import UserError
from oomph.training.config import TrainConfig
from oomph.training.data import open_data
from oomph.training.export import export
from oomph.training.failures import OutOfMemory
from oomph.training.metrics import Callbacks
from oomph.training.run_folder import (
    check_folder,
    disk_errors,
    folder_of,
    lock_folder,
    read_config,
    write_config,
)
from oomph.training.trainer import Outcome, Trainer
from oomph.training.workloads import workload
from oomph.units import parse_bytes
from oomph.workload import set_allocator


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    callbacks: Callbacks | None = None,
    export_to: str | None = None,
) -> Outcome:
    """Train as the config says. resume: continue from the newest checkpoint in its folder."""
    callbacks = callbacks or Callbacks()
    folder = folder_of(config)
    check_folder(config, folder, resume)
    if export_to is not None:
        _check_export(export_to)
    with torch.device("meta"):  # the model and the fixes refuse a config before data are read
        workload(config).make_model(lambda made: made)
    with lock_folder(folder):
        check_folder(config, folder, resume)  # another run may have started and ended since
        with disk_errors(folder), deterministic_algorithms(config.training.deterministic):
            return _train(config, folder, resume, callbacks, export_to)


def _train(
    config: TrainConfig, folder: Path, resume: bool, callbacks: Callbacks, export_to: str | None
) -> Outcome:
    training, device = config.training, device_of(config)
    _seed(training.seed)
    step = workload(config)
    if device.type == "cuda":
        if training.memory_limit is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            limit = min(1.0, parse_bytes(training.memory_limit) / total)
            torch.cuda.set_per_process_memory_fraction(limit, device)
        if step.allocator is not None:
            set_allocator(step.allocator)
    data = open_data(config, folder, workers=int(device.type == "cuda"))
    for message in (data.description, *_warnings(config, device)):
        callbacks.on_message(message)
    try:
        trainer = Trainer(config, step, data, folder, device, callbacks)
        resumed_at = trainer.resume() if resume else None
    except torch.OutOfMemoryError as error:
        why = "there is no room for the model and the optimizer state; no step was made"
        raise OutOfMemory(str(error), [], None, why) from error
    if resume:
        where = "no checkpoint yet: starting" if resumed_at is None else f"resumed at step {resumed_at}"
        callbacks.on_message(where)
    if resumed_at is not None:
        _check_steps_left(config, folder, resumed_at, callbacks)
    write_config(config, folder)
    try:
        outcome = trainer.run()
    finally:
        data.train.close()
    if export_to is not None and outcome.stopped is not None:
        callbacks.on_message(f"stopped before its end: no weights are written to {export_to}")
    elif export_to is not None:
        export(trainer.model.state_dict(), export_to, {"config": config.name, "step": str(outcome.step)})
        callbacks.on_message(f"weights are in {export_to}")
    return outcome


def _warnings(config: TrainConfig, device: torch.device) -> Iterator[str]:
    """What is valid, and perhaps not intended."""
    training = config.training
    if device.type == "cpu":
        for name in ("autocast", "dtype"):
            given = getattr(training, name)
            if given not in (None, "float32", "float64"):
                yield f"training.{name}={given}: many CPUs emulate it, which is far slower"
    if training.steps is None:
        if training.schedule != "constant":
            yield (
                f"training.schedule={training.schedule}: with epochs the last step is not known, so the "
                "learning rate stays where the warm-up ends; give training.steps for a schedule"
            )
        return
    reached = config.curriculum.stage_number(training.steps - 1) + 1
    if reached < len(config.stages):
        total = len(config.stages)
        yield f"training.steps={training.steps} ends in stage {reached} of the curriculum's {total}"
    if training.warmup > training.steps:
        yield (
            f"training.warmup={training.warmup} is more than training.steps={training.steps}: the learning "
            "rate never reaches the full one"
        )


def _check_steps_left(config: TrainConfig, folder: Path, step: int, callbacks: Callbacks) -> None:
    steps = config.training.steps
    if steps is None or step < steps:
        return
    if step == steps:
        callbacks.on_message(f"the run is complete at step {step}; give training.steps=... to continue")
        return
    first = read_config(folder, config.name).training.steps
    raise UserError(
        f"the run in {folder} is at step {step}, and training.steps is {steps} (at its start: {first}); "
        "give training.steps=N with more"
    )


def _check_export(file: str) -> None:
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


def device_of(config: TrainConfig) -> torch.device:
    """training.device, or a GPU if there is one."""
    name = config.training.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"training.device={name!r} is not a device; give cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"training.device={name!r} is not supported; give cpu, cuda or cuda:0")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"training.device={name!r}: torch finds no GPU; give cpu, or leave it out")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
