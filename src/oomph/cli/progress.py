"""A progress display on stderr for traces that take a while; silent where nobody watches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

Report = Callable[[str, float | None], None]

PATIENCE_S = 2.0


@contextmanager
def progress_display(console: Console, patience: float = PATIENCE_S) -> Iterator[Report]:
    """A function to report progress to: what is going on, and the fraction done or None.

    Nothing appears within the first `patience` seconds, and nothing at all off a terminal. The display
    starts from a timer, since a slow import reports nothing that could start it.
    """
    if not console.is_terminal:
        yield lambda text, fraction: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(
        SpinnerColumn("dots" if console.encoding.lower().startswith("utf") else "line"),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=5,
    )
    task = progress.add_task("loading the program", total=None)

    def report(text: str, fraction: float | None) -> None:
        if fraction is None:
            progress.update(task, description=text, total=None)
        else:
            progress.update(task, description=text, total=1.0, completed=fraction)

    timer = threading.Timer(patience, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield report
    finally:
        timer.cancel()
        timer.join()  # it may be starting the display just now
        progress.stop()
