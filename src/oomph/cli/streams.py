"""Stdout is for the report: it is written in one piece, and what the traced program prints goes to stderr."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


def write_stdout(text: str) -> None:
    """Write all of `text`; a reader that has gone away (`oomph ... | head`) is no error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    # A file name that the terminal cannot show must not cost the whole report.
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _point_nowhere(sys.stdout)


def let_go_of_streams() -> None:
    """At the end of the process: a reader or a terminal that has gone away does not change how it ends."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:  # before the process began, or by the program
            continue
        try:
            stream.flush()
        except OSError:
            _point_nowhere(stream)


def _point_nowhere(stream: TextIO) -> None:
    """What is still buffered would fail again when Python closes the stream at exit, with status 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send `print`, and what C code or subprocesses write to descriptor 1, to stderr for a while."""
    saved = sys.stdout
    descriptor = _swap_descriptor()
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = saved
        with suppress(OSError, ValueError):
            # The program may have written to sys.__stdout__, or to a reference taken before the swap.
            saved.flush()
        if descriptor is not None:
            _flush_c()
            os.dup2(descriptor, 1)
            os.close(descriptor)


def _swap_descriptor() -> int | None:
    """Point descriptor 1 at 2 and return a copy of the old 1; None where a descriptor is closed."""
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


def _flush_c() -> None:
    """C's stdout keeps its own buffer; left alone it would end up behind the report."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
