"""The allocator's history on a real GPU: recorded at low cost, and read where memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from oomph.torch_internals import (
    cuda_lazy_call,
    memory_snapshot,
    out_of_memory_observer,
    record_memory_history,
)

_MOST_ENTRIES = 200_000  # the newest are kept


def record_history(on_out_of_memory: Callable[[Any], None] | None = None) -> None:
    """Record from the moment on at which the program first uses CUDA: before it, it may choose its devices.

    `on_out_of_memory` is called with the snapshot of the first request that fails, when its tensors are still
    alive, also where the program catches the error.
    """
    called = False

    def failed(*_: Any) -> None:
        nonlocal called
        if not called and on_out_of_memory is not None:
            called = True
            with contextlib.suppress(Exception):  # a report is not worth a run
                on_out_of_memory(snapshot())

    def start() -> None:
        with contextlib.suppress(Exception):
            record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_ENTRIES)
            if on_out_of_memory is not None and out_of_memory_observer is not None:
                out_of_memory_observer(failed)

    cuda_lazy_call(start)


def snapshot() -> Any:
    return memory_snapshot()
