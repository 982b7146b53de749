"""Work done ahead of time in threads, its results handed out in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST_THREADS = 8


def threads_to_use() -> int:
    """One core is the training's."""
    # On Linux those that this process may use, which can be fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores - 1))


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads: int, ahead: int
) -> Iterator[Result]:
    """map(function, items), with up to `ahead` results in the making while the last one is used.

    What an item or its result raises is raised in its turn, after all that came before it. The threads are
    daemons, where a pool's would finish all that waits before their process could end.
    """
    tasks: SimpleQueue[tuple[Future[Result], Item] | None] = SimpleQueue()
    for _ in range(threads):
        Thread(target=_work, args=(function, tasks), daemon=True).start()
    waiting: deque[Future[Result]] = deque()
    coming = iter(items)
    ended: BaseException | None = None
    try:
        while True:
            while ended is None and len(waiting) < ahead:
                try:
                    item = next(coming)
                except Exception as error:
                    ended = error
                    break
                waiting.append(Future())
                tasks.put((waiting[-1], item))
            if not waiting:
                break
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in range(threads):
            tasks.put(None)
    if ended is not None and not isinstance(ended, StopIteration):
        raise ended


def _work(function: Callable[[Any], Any], tasks: SimpleQueue[Any]) -> None:
    while (task := tasks.get()) is not None:
        future, item = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(function(item))
        except BaseException as error:
            future.set_exception(error)
