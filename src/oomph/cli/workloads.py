"""A target as the Workload that it is, or gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
        from oomph.prediction.program import described

        raise UserError(
            f"target {name!r} returned {described(found)}; fixes and sizes need a Workload, or a function "
            "that returns one; in a loop of your own, "
            'oomph.apply("activation_checkpointing", model)'
        )
    return found


def sizes_from_words(words: Sequence[str], target: str) -> dict[str, int]:
    """`B=4 T=512` after a program: sizes of its Workload, which are all that can be changed from outside."""
    sizes = {}
    for word in words:
        match = re.fullmatch(r"([A-Za-z_]\w*)=([1-9]\d*)", word)
        if match is None:
            raise UserError(
                f"target {target!r} is a program, and {word!r} is no size of its Workload, such as B=4: "
                "change the program, or give a .yaml file, whose keys can be overridden"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def resized(workload: Workload, sizes: Mapping[str, int]) -> Workload:
    known = workload.sizes or {}
    for name in sizes:
        if name not in known:
            has = ", ".join(f"{own}={size}" for own, size in known.items())
            none = 'none; name them, as Workload(batch=lambda device, B: ..., sizes={"B": 8})'
            raise UserError(f"the Workload has no size {name!r}; its sizes are {has or none}")
    return replace(workload, sizes={**known, **sizes})
