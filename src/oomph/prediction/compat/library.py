"""The one shape of the files of this folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oomph.prediction.patches import Patches

if TYPE_CHECKING:
    from oomph.prediction.tracer.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Library:
    """When it applies, and what it installs. A library that is not imported costs nothing."""

    name: str
    module: str | None  # `in_trace` runs once the program has imported it; None: at the start
    in_trace: Callable[[Patches, Tracer], None] | None = None
    in_process: Callable[[Collection[str]], None] | None = None  # isolated; what is allowed
    environment: Mapping[str, str] = field(default_factory=dict)  # of that process
    is_query: Callable[[tuple[str, ...]], bool] | None = None  # a command that changes nothing
    before_fork: Callable[[], None] | None = None  # in the caller's process, before the child is made
    as_program: Callable[[Any], Any] | None = None  # a function that trains, for a target of the library's
    # Of a class Trainer: its module, and the method that is called once for all of training, before there is
    # an optimizer or a DataLoader.
    training_loops: Mapping[str, str] = field(default_factory=dict)
    float32_ops: tuple[str, ...] = ()  # under autocast
    result_rows: Mapping[str, Callable[[int], int]] = field(default_factory=dict)  # typical, of so many
    unread_results: tuple[str, ...] = ()  # classes, of what a model returns and no training loop reads
    next_evaluation: Callable[[], int | None] | None = None  # the step after which its loop evaluates first
    # Packages without which the program failed, in its process; and in the caller's, before it runs again.
    lacked: Callable[[BaseException | None], Collection[str]] | None = None
    provide: Callable[[Collection[str]], None] | None = None


def class_names(value: Any) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}


def begins(words: tuple[str, ...], queries: Iterable[tuple[str, ...]]) -> bool:
    """Whether a command begins with one of the queries."""
    return any(words[: len(each)] == each for each in queries)
