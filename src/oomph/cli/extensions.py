"""Commands and kinds of targets that other distributions add, such as oomph-lab, by their entry points.

oomph.commands: a typer app of one command, by the command's name.
oomph.targets: a class like Config, by the suffix of the files that are its targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

from oomph.errors import UserError

if TYPE_CHECKING:
    from oomph.parallel import Parallel
    from oomph.workload import Workload

COMMANDS, TARGETS = "oomph.commands", "oomph.targets"
# What oomph-lab adds, so that its commands and targets are explained where it is not installed.
_OF_LAB = {COMMANDS: ("train", "systems"), TARGETS: ("yaml", "yml")}


class Config(Protocol):
    """A file that describes a step, with `key=value` overrides as they were typed.

    It is made before torch is imported, and raises a UserError for mistakes that show in its words and in the
    file system alone.
    """

    def __init__(self, file: str, words: Sequence[str]) -> None: ...

    @property
    def memory_limit(self) -> str | None:
        """The size that its run gives to the allocator."""

    def workload(self) -> Workload: ...

    def on_ranks(self, workload: Workload, parallel: Parallel, chosen: bool) -> Workload:
        """`workload`, whose batch is that of all ranks, on one of them. chosen: `parallel` was asked for."""


_REGISTERED: list[metadata.EntryPoint] = []


def register(group: str, objects: Mapping[str, str]) -> None:
    """name -> "module:object", for a package that is on the path without being installed."""
    _REGISTERED.extend(metadata.EntryPoint(name, value, group) for name, value in objects.items())


@cache
def _installed(group: str) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=group))


def _points(group: str) -> dict[str, metadata.EntryPoint]:
    added = [point for point in _REGISTERED if point.group == group]
    return {point.name: point for point in (*_installed(group), *added)}


def names(group: str) -> list[str]:
    return list(_points(group))


def load(group: str, name: str) -> Any:
    """The object of that name; None where nothing has it."""
    point = _points(group).get(name)
    if point is not None:
        try:
            return point.load()
        except ImportError as error:
            raise UserError(f"{name}: {point.module} cannot be imported: {error}") from error
    if name not in _OF_LAB[group]:
        return None
    what = f"`oomph {name}` is a command" if group == COMMANDS else f"a .{name} file is a config"
    raise UserError(f"{what} of oomph-lab, which is not installed: pip install oomph-lab")
