"""The training loops of libraries: where they begin."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from oomph.prediction.compat.registry import TRAINING_LOOPS
from oomph.prediction.patches import Patches


@dataclass(frozen=True, eq=False)
class TrainingLoop:
    """A Trainer that is about to train."""

    trainer: Any
    arguments: dict[str, Any]  # of the method; what is changed here is what it gets

    @property
    def model(self) -> Any:
        return self.arguments.get("model") or self.trainer.model


@contextlib.contextmanager
def on_each_training_loop(call: Callable[[TrainingLoop], None]) -> Iterator[None]:
    """Call it with each loop of a Trainer that begins inside."""
    with Patches() as patches:
        for module, method in TRAINING_LOOPS.items():
            patches.when_imported(module, functools.partial(_hook, patches, module, method, call))
        yield


def _hook(patches: Patches, module: str, method: str, call: Callable[[TrainingLoop], None]) -> None:
    trainer_class = getattr(sys.modules[module], "Trainer", None)
    train = getattr(trainer_class, method, None)
    if train is None:  # another release
        return
    signature = inspect.signature(train)

    @functools.wraps(train)
    def begin(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(trainer, *args, **kwargs)
        call(TrainingLoop(trainer, given.arguments))
        return train(*given.args, **given.kwargs)

    patches.set(trainer_class, method, begin)
