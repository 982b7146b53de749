"""The errors and warnings that users see. Each error carries the exit status of the command line."""

import warnings
from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit statuses of the command line."""

    FITS = 0  # also: verified, trained, listed
    DOES_NOT_FIT = 1  # also: not verified
    USER_ERROR = 2
    PROGRAM_ERROR = 3  # the traced program failed
    BUG = 70  # in oomph
    INTERRUPTED = 130  # as a shell reports Ctrl-C


class OomphError(Exception):
    """Base of all errors that oomph raises on purpose; the message is one line."""

    exit_status = ExitStatus.USER_ERROR


class UserError(OomphError):
    """The user's mistake: the message says what was given and what is valid."""


class ArgumentError(UserError, ValueError):
    """An argument of one of our functions is not valid; also a ValueError."""


class ProgramError(OomphError):
    """The traced program itself failed. `__cause__` is its own exception, with its own traceback."""

    exit_status = ExitStatus.PROGRAM_ERROR

    def __init__(self, message: str, file: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.line = line


class DeprecatedName(FutureWarning):
    """An old name was used that is still accepted. The command line prints the message as one line."""


def warn_deprecated(old: str, new: str) -> None:
    """`old` is still accepted; `new` replaces it. Both as the user writes them, e.g. "form: sick"."""
    warnings.warn(f"{old} is deprecated; use {new}", DeprecatedName, stacklevel=3)
