"""torch.utils.collect_env describes the machine by the output of a dozen programs."""

from __future__ import annotations

from collections.abc import Collection

from torch.utils import collect_env

from oomph.prediction.compat.library import Library


def _start_nothing(allow: Collection[str]) -> None:
    """It takes any of them to fail."""
    if "subprocesses" not in allow:
        collect_env.run = lambda command: (127, "", "not started in a prediction")


LIBRARY = Library("collect_env", None, in_process=_start_nothing)
