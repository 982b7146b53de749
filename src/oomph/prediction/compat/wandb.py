"""wandb: its offline mode starts a server. A prediction logs nothing, whatever mode the program asks for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from oomph.prediction.compat.library import Library
from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


def _disable(patches: Patches, tracer: Tracer) -> None:
    """The program's own mode comes before the variable of the environment."""
    wandb: Any = sys.modules["wandb"]
    if init := getattr(wandb, "init", None):
        patches.set(wandb, "init", lambda *args, **kwargs: init(*args, **{**kwargs, "mode": "disabled"}))
        patches.set(wandb, "login", lambda *args, **kwargs: True, missing_ok=True)


LIBRARY = Library("wandb", "wandb", in_trace=_disable, environment={"WANDB_MODE": "disabled"})
