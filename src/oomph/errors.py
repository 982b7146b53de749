"""The errors and warnings that users see. Each error carries the exit status of the command line."""

import warnings


class OomphError(Exception):
    """Base of everything oomph raises on purpose; its message is one clear line."""

    exit_status = 2


class UserError(OomphError):
    """The user's mistake: the message says what was given and what is valid."""

    exit_status = 2


class ArgumentError(UserError, ValueError):
    """A function of oomph was given an argument it cannot take; a ValueError to code that knows no oomph."""


class ProgramError(OomphError):
    """The traced program itself failed. `__cause__` is its own exception, with its own traceback."""

    exit_status = 3

    def __init__(self, message: str, file: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.line = line


class DeprecatedName(FutureWarning):
    """An old name was used that is still accepted. The command line prints the message as one line."""


def warn_deprecated(old: str, new: str) -> None:
    """`old` is still accepted; `new` replaces it. Both as the user writes them, e.g. "form: sick"."""
    warnings.warn(f"{old} is deprecated; use {new}", DeprecatedName, stacklevel=3)
