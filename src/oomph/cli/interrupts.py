"""Ctrl-C in a command, from its first line on."""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130  # ExitStatus.INTERRUPTED: this file imports nothing of ours


def handle_interrupts() -> None:
    """KeyboardInterrupt, except while a module is imported: native code that imports others, such as torch's,
    aborts the process or takes any exception for a missing module. Such a process ends at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not of nohup
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"oomph: interrupted\n")
            os._exit(_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt
