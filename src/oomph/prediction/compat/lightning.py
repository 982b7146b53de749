"""Lightning: a Trainer has no model before fit, so it is no target."""

from __future__ import annotations

import sys
from typing import Any

from oomph.errors import UserError
from oomph.prediction.compat.library import Library, class_names

_TRAINERS = {"lightning.pytorch.trainer.trainer.Trainer", "pytorch_lightning.trainer.trainer.Trainer"}


def _as_program(target: Any) -> Any:
    if class_names(target) & _TRAINERS:
        raise UserError(
            "a Trainer of Lightning has no model before fit; give a function that makes the trainer with "
            "accelerator='gpu' and calls fit"
        )
    return target


def _is_query(words: tuple[str, ...]) -> bool:
    """LightningCLI asks where stubs for the types of arguments are."""
    return words == (sys.executable, "-c", "import sys, json; print(json.dumps(sys.path))")


LIBRARY = Library(
    "Lightning",
    "lightning",
    is_query=_is_query,
    as_program=_as_program,
    training_loops={"lightning.pytorch.trainer.trainer": "fit", "pytorch_lightning.trainer.trainer": "fit"},
)
