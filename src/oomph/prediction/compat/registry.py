"""All libraries, and what the rest of `prediction` asks of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from oomph.prediction.compat import (
    arrow,
    bitsandbytes,
    collect_env,
    data_parallel,
    fvcore,
    git,
    huggingface_hub,
    joblib,
    lightning,
    mpi4py,
    nvidia_smi,
    nvml,
    safetensors,
    stand_ins,
    tensorboard,
    tokenizers,
    torchscript,
    torchvision,
    transformers,
    triton,
    wandb,
)
from oomph.prediction.compat.library import class_names
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer

LIBRARIES = (
    torchscript.LIBRARY,  # before those that call it
    tensorboard.LIBRARY,
    fvcore.LIBRARY,
    triton.LIBRARY,
    data_parallel.LIBRARY,
    torchvision.LIBRARY,
    bitsandbytes.LIBRARY,
    nvml.LIBRARY,
    safetensors.LIBRARY,
    arrow.LIBRARY,
    tokenizers.LIBRARY,
    huggingface_hub.LIBRARY,
    transformers.LIBRARY,
    lightning.LIBRARY,
    wandb.LIBRARY,
    mpi4py.LIBRARY,
    joblib.LIBRARY,
    git.LIBRARY,
    nvidia_smi.LIBRARY,
    collect_env.LIBRARY,
    stand_ins.LIBRARY,
)


# Ops that compute in float32 under autocast and return the dtype of their first argument.
FLOAT32_OPS = tuple(op for library in LIBRARIES for op in library.float32_ops)
TRAINING_LOOPS = {module: name for library in LIBRARIES for module, name in library.training_loops.items()}
# Of ops whose results depend on values: how many rows are typical, of how many there are.
RESULT_ROWS = {op: rows for library in LIBRARIES for op, rows in library.result_rows.items()}

_UNREAD = {name for library in LIBRARIES for name in library.unread_results}


def is_unread(value: Any) -> bool:
    """Whether it is something that models return in training, and no training loop reads."""
    return not _UNREAD.isdisjoint(class_names(value))


def before_fork() -> None:
    """Once in the caller's process, and not again in every child."""
    for library in LIBRARIES:
        if library.before_fork is not None:
            library.before_fork()


def in_process(allow: Collection[str]) -> None:
    """Once in the isolated process, before the program starts. `allow`: what is real, as "network"."""
    for library in LIBRARIES:
        os.environ.update(library.environment)
        if library.in_process is not None:
            library.in_process(allow)


def is_query(words: tuple[str, ...]) -> bool:
    return any(library.is_query(words) for library in LIBRARIES if library.is_query is not None)


def in_trace(patches: Patches, tracer: Tracer) -> None:
    """For as long as `patches` last."""
    for library in LIBRARIES:
        if library.in_trace is not None:
            install = functools.partial(library.in_trace, patches, tracer)
            if library.module is None:
                install()
            else:
                patches.when_imported(library.module, install)


def as_program(target: Any) -> Any:
    """A function for an object of a library that trains by itself; everything else as it is."""
    for library in LIBRARIES:
        if library.as_program is not None:
            target = library.as_program(target)
    return target


def next_evaluation() -> int | None:
    """The step after which the loop that runs now evaluates for the first time; None where none will."""
    asked = (each.next_evaluation() for each in LIBRARIES if each.next_evaluation is not None)
    return next((step for step in asked if step is not None), None)


def lacked(error: BaseException) -> frozenset[str]:
    """What the program failed without, for which there is a stand-in."""
    return frozenset(
        name for library in LIBRARIES if library.lacked is not None for name in library.lacked(error)
    )


def provide(packages: Collection[str]) -> None:
    """For programs that run from here on."""
    for library in LIBRARIES:
        if library.provide is not None:
            library.provide(packages)
