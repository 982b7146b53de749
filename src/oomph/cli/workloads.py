"""A target as the Workload that it is, or gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oomph.errors import ProgramError, UserError

if TYPE_CHECKING:
    from oomph.workload import Workload


def workload_of(target: Workload | Callable[[], Any], name: str) -> Workload:
    """The target as a Workload, which is what fixes can be put into."""
    from oomph.workload import Workload

    if isinstance(target, Workload):
        return target
    from oomph.prediction import called

    try:
        found = called(target)
    except SystemExit as error:
        message = f"target {name!r} ends the process when it is called (SystemExit: {error.code})"
        raise ProgramError(message) from error
    if not isinstance(found, Workload):
        raise UserError(
            f"target {name!r} returned {type(found).__name__}; fixes need a Workload, or a function that "
            "returns one"
        )
    return found
