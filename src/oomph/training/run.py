"""A run: a config, a folder, and what is in it. New, or resumed where it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from oomph.deterministic import deterministic_algorithms
from oomph.errors import UserError
from oomph.training.checkpoints import export
from oomph.training.config import TrainConfig
from oomph.training.data import open_data
from oomph.training.loop.failures import OutOfMemory
from oomph.training.loop.listener import Listener, Silent
from oomph.training.loop.memory import limit_memory
from oomph.training.loop.trainer import Outcome, Trainer
from oomph.training.run_folder import (
    alone_in,
    check_folder,
    folder_of,
    one_line_of_the_disk,
    read_config,
    write_config,
)
from oomph.training.workloads import workload
from oomph.units import parse_bytes
from oomph.workload import set_allocator


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
        with one_line_of_the_disk(folder), deterministic_algorithms(config.training.deterministic):
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
    for remark in _remarks(config, device):
        listener.said(remark)
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
    write_config(config, folder)
    try:
        outcome = trainer.run()
    finally:
        data.train.close()
    if export_to is not None and outcome.stopped is not None:
        listener.said(f"stopped before its end: no weights are written to {export_to}")
    elif export_to is not None:
        export(trainer.model.state_dict(), export_to, {"config": config.name, "step": str(outcome.step)})
        listener.said(f"weights are in {export_to}")
    return outcome


def _remarks(config: TrainConfig, device: torch.device) -> Iterator[str]:
    """What is valid, and perhaps not what was meant."""
    training = config.training
    if device.type == "cpu":
        for name in ("autocast", "dtype"):
            given = getattr(training, name)
            if given not in (None, "float32", "float64"):
                yield f"training.{name}={given}: many CPUs only imitate it, far slower"
    if training.steps is None and training.schedule != "constant":
        yield (
            f"training.schedule={training.schedule}: with epochs the last step is not known, so the "
            "learning rate stays where the warm-up ends; give training.steps for a schedule"
        )
    if training.steps is not None:
        begins = [sum(stage.steps or 0 for stage in config.stages[:at]) for at in range(len(config.stages))]
        reached = sum(begin < training.steps for begin in begins)
        if reached < len(begins):
            yield f"training.steps={training.steps} ends in stage {reached} of the curriculum's {len(begins)}"
    if training.steps is not None and training.warmup > training.steps:
        yield (
            f"training.warmup={training.warmup} is more than training.steps={training.steps}: the learning "
            "rate never reaches the full one"
        )


def _check_steps_left(config: TrainConfig, folder: Path, step: int, listener: Listener) -> None:
    """A resumed run that has nothing to do says so."""
    steps = config.training.steps
    if steps is None or step < steps:
        return
    if step == steps:
        listener.said(f"the run is complete at step {step}; give training.steps=... to go on")
        return
    begun = read_config(folder, config.name).training.steps
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


def device_of(config: TrainConfig) -> torch.device:
    name = config.training.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"training.device={name!r} is not a device; give cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"training.device={name!r}: training is on cpu, cuda or cuda:0")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f"training.device={name!r}: torch sees no GPU; give cpu, or leave it out")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
