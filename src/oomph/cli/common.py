"""What commands share: their streams and files, and arguments and options that several of them have.

The report goes to stdout in one piece, or to a file (`--html`); the program's output and progress to stderr.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TextIO, get_origin, get_type_hints

import typer
from rich.console import Console

from oomph import gpus
from oomph.errors import UserError
from oomph.fix_names import check_name
from oomph.models.finetuning import METHODS, FineTuning
from oomph.records import Prediction, Progress

PROGRESS_DELAY_S = 2.0  # after the command began
LINES_EVERY_S = 5.0
_BEGAN = time.monotonic()
_REFRESH_S = 0.2
# Held while the bar is drawn, and by forks: a predicted program that prints in a child would wait for good
# for a lock of rich that the thread of the bar held.
_drawing = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release
    )


def write_stdout(text: str) -> None:
    """Write all of `text`; a closed pipe (`oomph ... | head`) is not an error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # A file name that the terminal cannot encode must not make the whole report fail.
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        _redirect_to_devnull(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"stdout cannot be written: {error.strerror}") from error


def write_json(found: Mapping[str, Any]) -> None:
    """The one object that `--json` prints."""
    write_stdout(json.dumps(found, allow_nan=False) + "\n")


def open_missing_streams() -> None:
    """Streams that were closed when the process began (`oomph ... >&-`) are None in Python."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def flush_streams() -> None:
    """At the end of the process: a closed pipe or terminal does not change the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if stream.closed:  # by the program
            continue
        try:
            stream.flush()
        except OSError:
            _redirect_to_devnull(stream)


def _redirect_to_devnull(stream: TextIO) -> None:
    """Without this, Python would flush the buffer again at exit, fail again, and exit with status 120."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send `print`, and what C code or subprocesses write to file descriptor 1, to stderr."""
    saved = sys.stdout
    descriptor = _redirect_descriptor()
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = saved
        with suppress(OSError, ValueError):
            # The program may have written to sys.__stdout__, or to a reference taken before.
            saved.flush()
        if descriptor is not None:
            # C's stdout has its own buffer, which would otherwise be written after the report.
            with suppress(OSError, AttributeError, TypeError):
                ctypes.CDLL(None).fflush(None)
            os.dup2(descriptor, 1)
            os.close(descriptor)


def _redirect_descriptor() -> int | None:
    """Make descriptor 1 a copy of 2 and return a copy of the old 1; None if one of them is closed."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        copy = os.dup(1)
    except OSError:
        return None
    try:
        os.dup2(2, 1)
    except OSError:
        os.close(copy)
        return None
    return copy


@contextmanager
def _nothing_shown() -> Iterator[None]:
    """Also of processes that are started meanwhile."""
    streams, saved = (sys.stdout, sys.stderr), [os.dup(1), os.dup(2)]
    for stream in streams:
        stream.flush()
    try:
        with open(os.devnull, "w") as nothing:
            sys.stdout = sys.stderr = nothing
            os.dup2(nothing.fileno(), 1)
            os.dup2(nothing.fileno(), 2)
            yield
    finally:
        sys.stdout, sys.stderr = streams
        for copy, descriptor in zip(saved, (1, 2), strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)


@contextmanager
def _in_thread(draw: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `draw` in a thread, until the event that it is given is set."""
    ended = threading.Event()
    drawer = threading.Thread(target=draw, args=(ended,), daemon=True)
    drawer.start()
    try:
        yield
    finally:
        ended.set()
        drawer.join()


@contextmanager
def _progress_lines(delay: float) -> Iterator[Progress]:
    """Print the newest text every few seconds, unless it is the one before."""
    newest = ""

    def report(text: str, fraction: float | None) -> None:
        nonlocal newest
        newest = text if fraction is None else f"{text} ({fraction:.0%})"

    def draw(ended: threading.Event) -> None:
        printed, pause = "", delay
        while not ended.wait(pause):
            pause = LINES_EVERY_S
            if newest != printed:
                printed = newest
                with _drawing, suppress(OSError):
                    print(f"oomph: {printed}", file=sys.stderr, flush=True)

    with _in_thread(draw):
        yield report


@contextmanager
def progress_display(console: Console, delay: float = PROGRESS_DELAY_S) -> Iterator[Progress]:
    """A progress bar, and the function that updates it.

    It appears `delay` seconds after the command began, drawn by a thread so that it moves between updates,
    and only on a terminal; elsewhere a line is printed every few seconds.
    """
    delay = max(0.0, _BEGAN + delay - time.monotonic())
    if not console.is_terminal:
        with _progress_lines(delay) as print_later:
            yield print_later
        return
    from rich import progress as bars

    progress = bars.Progress(
        bars.SpinnerColumn("dots" if console.encoding.lower().startswith("utf") else "line"),
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=24),
        bars.TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
    )
    task = progress.add_task("loading the program", total=None)

    def report(text: str, fraction: float | None) -> None:
        if fraction is None:
            progress.update(task, description=text, total=None)
        else:
            progress.update(task, description=text, total=1.0, completed=fraction)

    def draw(ended: threading.Event) -> None:
        if ended.wait(delay):
            return
        with _drawing:
            progress.start()
        while not ended.wait(_REFRESH_S):
            with _drawing:
                progress.refresh()

    try:
        with _in_thread(draw):
            yield report
    finally:
        progress.stop()


@contextmanager
def program_output(quiet: bool = False) -> Iterator[Progress]:
    """What the program prints goes to stderr, and so does progress, whose bar wraps that output.
    `quiet`: neither is shown."""
    if quiet:
        with _nothing_shown():
            yield lambda text, fraction: None
        return
    with stdout_to_stderr(), progress_display(Console(stderr=True)) as report:
        yield report


def load_torch(quiet: bool = False) -> None:
    """Import torch, which takes seconds, with a progress bar. Look for mistakes of the user before."""
    if quiet:
        import_module("oomph.prediction")
        return
    with progress_display(Console(stderr=True)) as report:
        report("loading torch", None)
        import_module("oomph.prediction")


# ------------------------------------------------------------------------------------------------------ files


def check_output_file(option: str, file: str | None, example: str) -> None:
    """Raise for a file that cannot be written, before anything is traced."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise UserError(f"{option} {file!r} is a directory; give a file, e.g. {example}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option} {file!r}: the directory {str(path.parent)!r} does not exist")


def write_page(file: str, target: str, runs: Sequence[tuple[str, Prediction]], **sections: Any) -> None:
    """`sections`: findings, plan, measured, notes of a Page."""
    from oomph.report.html import Page, write_html

    cards = sorted(gpus.catalogue(), key=lambda card: card.memory)
    limits = [(card.title, card.memory, card.context) for card in cards]
    try:
        write_html(file, Page(target.removeprefix("-- "), runs, limits, **sections))
    except OSError as error:
        raise UserError(f"--html {file!r} cannot be written: {error.strerror or error}") from error
    print(f"oomph: the report is in {file}", file=sys.stderr)


# -------------------------------------------------------------------------------------- arguments and options

TAKES_KEYS = {"ignore_unknown_options": True}  # --key value may be a key of a config

Module = Annotated[
    str | None, typer.Option("-m", metavar="MODULE", help="Run a module as a script, as `python -m` does.")
]
Torchrun = Annotated[bool, typer.Option("--torchrun", help="Run a script as the only rank of torchrun.")]
OverrideWords = Annotated[
    tuple[str, ...],
    typer.Argument(
        metavar="[KEY=VALUE ...]",
        help="For a config: override a key, e.g. data.batch_size=4 or --batch_size 4. "
        "For a Workload: override a size, e.g. B=4. Arguments of a script come after --.",
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|SIZE|here",
        help="The GPU: a name from `oomph gpus`, a size, or `here`: what is free on this machine's.",
    ),
]
Max = Annotated[str | None, typer.Option(metavar="SIZE", help="Limit of the caching allocator, e.g. 24GiB.")]
Steps = Annotated[
    int | None, typer.Option(metavar="N", help="Optimizer steps of a script to trace; default: 3.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of the report.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print only the verdict, and nothing that the program prints.")
]
Html = Annotated[str | None, typer.Option(metavar="FILE", help="Also write the report as one HTML file.")]
_FIX = typer.Option(
    metavar="FIX", help="Apply this fix; repeatable. name, name:option=value, or a .json file."
)
Fix = Annotated[list[str] | None, _FIX]
FixWords = Annotated[tuple[str, ...], _FIX]
PlanFile = Annotated[
    str | None, typer.Option(metavar="FILE.json", help="Apply the fixes of a plan of `oomph fit`.")
]
Allow = Annotated[
    str, typer.Option(metavar="KINDS", help="Also allow fixes of these kinds: precision, training, compile.")
]


_OF_MODEL = "Of a model's name: "


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a model that is given by its name is asked for; None: FineTuning's default."""

    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help=f"{_OF_MODEL}{', '.join(METHODS)}; default: full; of fit: full, lora and qlora.",
        ),
    ] = None
    batch: Annotated[int | None, typer.Option(metavar="B", help=f"{_OF_MODEL}rows; default: 1.")] = None
    length: Annotated[
        int | None, typer.Option(metavar="T", help=f"{_OF_MODEL}tokens of a row; default: 2048.")
    ] = None
    new: Annotated[
        int | None, typer.Option(metavar="N", help=f"{_OF_MODEL}tokens that generate adds; default: 128.")
    ] = None
    lora_rank: Annotated[int | None, typer.Option(metavar="R", help=f"{_OF_MODEL}default: 16.")] = None
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing", help=f"{_OF_MODEL}activation checkpointing; default: on."
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"{_OF_MODEL}as the Trainer names it; default: adamw_torch_fused, of qlora "
            "paged_adamw_8bit.",
        ),
    ] = None
    accumulate: Annotated[
        int | None, typer.Option(metavar="N", help=f"{_OF_MODEL}passes of a step; default: 1.")
    ] = None

    def finetuning(self, model: str) -> FineTuning:
        values = {field.name: getattr(self, field.name) for field in fields(ModelOptions)}
        return FineTuning(model, **{name: value for name, value in values.items() if value is not None})

    @property
    def given(self) -> list[str]:
        """Those that were given, as words."""
        words = []
        for field in fields(ModelOptions):
            name, value = field.name.replace("_", "-"), getattr(self, field.name)
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            elif value is not None:
                words += [f"--{name}", str(value)]
        return words


def fix_words(fix: Sequence[str] | None, plan: str | None) -> tuple[str, ...]:
    if plan is not None and not plan.endswith(".json"):
        raise UserError(
            f"--plan {plan!r} is not a .json file; `oomph fit TARGET --plan plan.json` writes one"
        )
    words = (*(fix or ()), *([plan] if plan is not None else []))
    for word in words:  # before torch is imported, which takes seconds
        if not word.endswith(".json"):
            check_name(word.partition(":")[0].strip())
        elif not os.path.lexists(word):
            raise UserError(f"file {word!r} cannot be read: No such file or directory")
    return words


def command(run: Callable[[Any], int], options: type) -> Callable[..., int]:
    """A function for typer: its parameters are the annotated fields of the dataclass that `run` takes."""
    types = {
        name: kind
        for name, kind in get_type_hints(options, include_extras=True).items()
        if get_origin(kind) is Annotated
    }
    signature = inspect.signature(options)
    for name, kind in types.items():
        if kind.__origin__ == tuple[str, ...]:  # typer takes lists
            types[name] = Annotated[list[str], *kind.__metadata__]
    parameters = signature.parameters
    fields = [each.replace(annotation=types[name]) for name, each in parameters.items() if name in types]

    def call(**given: Any) -> int:
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return run(options(**{**given, **lists}))

    call.__doc__ = run.__doc__
    call.__signature__ = signature.replace(parameters=fields)  # type: ignore[attr-defined]
    return call
