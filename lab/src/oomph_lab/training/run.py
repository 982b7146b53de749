"""`train(config)`: a new run in its folder, or one that is resumed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from oomph.errors import UserError
from oomph.torch_internals import deterministic_algorithms
from oomph.units import format_bytes, parse_bytes
from oomph.workload import set_allocator
from oomph_lab.training.checkpoint import DISK_FULL
from oomph_lab.training.config import (
    RUN_CONFIG,
    RUN_LOCK,
    ParallelConfig,
    TrainConfig,
    is_run,
    load_dict,
    read_mapping,
    to_yaml,
)
from oomph_lab.training.data import open_data
from oomph_lab.training.export import check_export, export, without_duplicates
from oomph_lab.training.failures import OutOfMemory, is_out_of_memory
from oomph_lab.training.metrics import Callbacks
from oomph_lab.training.ranks import ONE_PROCESS, Ranks, world_size
from oomph_lab.training.step import workload
from oomph_lab.training.trainer import Outcome, Trainer

# What may change when a run is resumed: where it ends (which a schedule follows) and what it reports.
_MAY_CHANGE = {
    ("output", "dir"),
    ("data", "workers"),
    *(("training", key) for key in ("steps", "epochs", "eval_every", "eval_at_start", "eval_batches")),
    *(("training", key) for key in ("save_every", "save", "keep", "log_every", "device", "on_nan")),
    *(("training", key) for key in ("memory_limit", "deterministic")),
    *(("parallel", key) for key in ParallelConfig.model_fields),
}


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    callbacks: Callbacks | None = None,
    export_to: str | None = None,
    ranks: Ranks = ONE_PROCESS,
) -> Outcome:
    """Train as the config says. resume: continue from the newest checkpoint in its folder.

    ranks: this process among those of the run; its folder was then checked before they joined.
    """
    callbacks = callbacks or Callbacks()
    folder = folder_of(config)
    if ranks.parallel is None:
        check_folder(config, folder, resume)
    if export_to is not None:
        check_export(export_to)
    _check_batch_bytes(config)
    step = workload(config)
    # The model and the fixes refuse a config before data are read.
    with no_room_errors(), torch.device("meta"):
        step.make_model(lambda made: made)
    with lock_folder(folder) if ranks.is_main_process else nullcontext():
        if ranks.is_main_process:
            check_folder(config, folder, resume)  # another run may have started and ended since
        with disk_errors(folder), deterministic_algorithms(config.training.deterministic):
            return _train(config, folder, resume, callbacks, export_to, ranks)


def _train(
    config: TrainConfig, folder: Path, resume: bool, callbacks: Callbacks, export_to: str | None, ranks: Ranks
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
    for message in _warnings(config, device):
        callbacks.on_message(message)
    with ranks.main_process_first():
        data = open_data(config, folder, workers=int(device.type == "cuda"))
    callbacks.on_message(data.description)
    with no_room_errors():
        trainer = Trainer(config, step, data, folder, device, callbacks, ranks)
        resumed_at = trainer.resume() if resume else None
    if resume:
        where = "no checkpoint yet: starting" if resumed_at is None else f"resumed at step {resumed_at}"
        callbacks.on_message(where)
    if resumed_at is not None:
        _check_steps_left(config, folder, resumed_at, callbacks)
    if export_to is not None:
        without_duplicates(trainer.model.state_dict())  # raises if they cannot be exported
    if ranks.is_main_process:
        write_config(config, folder)
    try:
        outcome = trainer.run()
    finally:
        data.train.close()
    if export_to is not None and outcome.stopped is not None:
        callbacks.on_message(f"stopped before its end: no weights are written to {export_to}")
    elif export_to is not None:
        state = ranks.full_state(trainer.model.state_dict())
        if ranks.is_main_process:
            export(state, export_to, {"config": config.name, "step": str(outcome.step)})
        callbacks.on_message(f"weights are in {export_to}")
    return outcome


def _warnings(config: TrainConfig, device: torch.device) -> Iterator[str]:
    """What is valid, and perhaps not intended."""
    training = config.training
    if device.type == "cpu":
        if training.device is None:
            yield "no GPU is available: training on the CPU"
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


def _check_batch_bytes(config: TrainConfig) -> None:
    """The batches of a step are on the host together. Data of any size can be repeated to fill them."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shape = config.model_config
    for stage in config.stages:
        # int64 tokens and labels, or float32 pixels
        each = 4 * shape.channels * shape.image_size**2 if stage.seq_len is None else 16
        needed = stage.tokens * stage.accumulate * each
        if needed > memory:
            raise UserError(
                f"the batches of a step need {format_bytes(needed)}, and this machine has "
                f"{format_bytes(memory)}; lower data.batch_size, data.seq_len or training.accumulate"
            )


@contextmanager
def no_room_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = "there is no room for the model and the optimizer state; no step was made"
        raise OutOfMemory(str(error), [], None, why) from error


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
        local = int(os.environ.get("LOCAL_RANK", 0)) if world_size() > 1 else 0
        if local >= torch.cuda.device_count():
            raise UserError(f"local rank {local} has no GPU: torch finds {torch.cuda.device_count()}")
        device = torch.device("cuda", local if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


# ------------------------------------------------------------------------------ the folder of a run


def folder_of(config: TrainConfig) -> Path:
    return Path(config.output.dir or Path("runs") / config.name).expanduser()


def check_folder(config: TrainConfig, folder: Path, resume: bool) -> None:
    """A new run never overwrites an old one; a resumed run has the config it was started with."""
    own = folder / RUN_CONFIG
    try:
        if not is_run(folder):
            if own.exists():
                raise UserError(
                    f"{own} is not of a run, and a run would overwrite it; give another output.dir"
                )
            if (folder / "checkpoints").exists():
                raise UserError(f"{folder} holds checkpoints, and no {RUN_CONFIG}; give another output.dir")
            if resume:
                raise UserError(f"{folder} holds no run to resume; leave --resume out, or give output.dir")
            return
        if not resume:
            raise UserError(
                f"{folder} holds a run already; continue with --resume, or give another output.dir"
            )
        different = _differences(read_config(folder, config.name).to_dict(), config.to_dict())
    except OSError as error:  # a name that is too long, a folder without permission
        raise UserError(f"cannot use {folder}: {error.strerror}; give another output.dir") from None
    if different:
        raise UserError(
            f"the run in {folder} was started with another config: {'; '.join(different)}; continue with its "
            f"own, `oomph train {own} --resume`, or give another output.dir"
        )


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
    """One line for a disk that is full, read-only or broken."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        advice = "; make room there" if error.errno in DISK_FULL else ""
        reason = f"{error.strerror or error}{where}"
        raise UserError(f"the run in {folder} ended: {reason}{advice}; continue with --resume") from error


def read_config(folder: Path, name: str) -> TrainConfig:
    path = folder / RUN_CONFIG
    return load_dict(read_mapping(path), name, source=str(path))


def write_config(config: TrainConfig, folder: Path) -> None:
    path = folder / RUN_CONFIG
    partial = path.with_suffix(".partial")
    partial.write_text(to_yaml(config.to_dict()), encoding="utf-8")
    os.replace(partial, path)
