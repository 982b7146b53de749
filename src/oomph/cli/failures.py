"""The traceback of a traced program as its author wants it: their frames, not ours or torch's."""

from __future__ import annotations

import os
import traceback
from itertools import pairwise
from pathlib import Path

from oomph.errors import ProgramError
from oomph.report.labels import short_path

_OOMPH = str(Path(__file__).resolve().parents[1]) + os.sep


def failure_text(error: ProgramError) -> str:
    """The program's own traceback, then one line with the place and the message."""
    cause = error.__cause__
    if cause is None:
        return _last_line(error)
    trimmed = traceback.TracebackException.from_exception(cause)
    _trim(trimmed)
    return "".join(trimmed.format()) + _last_line(error)


def program_error(error: BaseException) -> ProgramError:
    """A ProgramError that names the line of the user's code in which `error` arose."""
    file, line = _frame(error)
    # A SyntaxError's text repeats the place, which is told anyway.
    text = (error.msg if isinstance(error, SyntaxError) else str(error)).strip().split("\n")[0]
    name = type(error).__name__
    return ProgramError(f"{name}: {text}" if text else name, file, line)


def origin(error: BaseException) -> str:
    """`train.py:12`, the line of the user's code in which `error` arose; empty when it is not known."""
    file, line = _frame(error)
    return f"{short_path(file)}:{line}" if file else ""


def _frame(error: BaseException) -> tuple[str | None, int | None]:
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _internal(frame.filename)]
    if not frames:
        return None, None
    return frames[-1].filename, frames[-1].lineno


def _last_line(error: ProgramError) -> str:
    # The traceback above has the rest of a message of many lines.
    file, line, message = error.file, error.line, str(error).strip().split("\n")[0]
    if file is None and error.__cause__ is not None:
        file, line = _frame(error.__cause__)
    if file is None:
        return f"oomph: the program failed: {message}"
    where = f"{short_path(file)}:{line}" if line else short_path(file)
    if f"{Path(file).name}:{line}" in message:  # the message already says where
        return f"oomph: the program failed: {message}"
    return f"oomph: the program failed at {where}: {message}"


def _trim(trimmed: traceback.TracebackException) -> None:
    """Drop inner frames, in the whole chain of causes."""
    kept = [frame for frame in trimmed.stack if not _internal(frame.filename)]
    trimmed.stack = traceback.StackSummary.from_list(kept)
    for chained in (trimmed.__cause__, trimmed.__context__):
        if chained is not None:
            _trim(chained)


def _internal(file: str) -> bool:
    parts = Path(file).parts
    installed_torch = any(
        parent in ("site-packages", "dist-packages") and child in ("torch", "torchgen")
        for parent, child in pairwise(parts)
    )
    return installed_torch or file.startswith(("<frozen ", "<string>", _OOMPH))
