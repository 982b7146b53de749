"""What can go wrong, as a user sees it. Each error knows the exit status the command line ends with."""


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
