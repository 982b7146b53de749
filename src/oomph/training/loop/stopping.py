"""Ctrl-C, SIGTERM, a closed terminal: the step under way is finished and saved. A second one ends at once."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from oomph.training.signals import STOPPING

_SHORT = 0.5  # seconds: a step that ends within them needs no words
_PATIENCE = 3.0  # seconds that a second signal may take to be seen by the main thread
_CURSOR_ON = "\x1b[?25h"  # a progress display has hidden it
ENDED = 130


class Stopping:
    """`with Stopping(tell) as stopping:`; `stopping.asked` is the signal's name once there was one.

    Python calls a handler when the main thread comes back to it, which in the middle of a long computation
    may take minutes. So a thread says at once that a signal has come, and ends the process where a second
    one is not seen in time: what was saved is whole at any moment.
    """

    def __init__(self, tell: Callable[[str], None] = lambda told: None) -> None:
        self.asked: str | None = None
        self._tell = tell
        self._before: dict[int, object] = {}
        self._seen_twice, self._over = threading.Event(), threading.Event()
        self._write: socket.socket | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                    self._before[number] = signal.signal(number, self._handle)
            coming, self._write = socket.socketpair()
            self._write.setblocking(False)
            self._wakeup_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(coming,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._over.set()
        if self._write is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self._write.close()  # which ends the thread

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            self._seen_twice.set()
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

    def _watch(self, coming: socket.socket) -> None:
        """Told by the system, a byte for each signal, whatever the main thread does."""
        count = 0
        with coming:
            while numbers := coming.recv(64):
                for number in numbers:
                    if number not in self._before:
                        continue
                    count += 1
                    if count == 1 and not self._over.wait(_SHORT):
                        told = "the step under way is finished and saved; once more ends at once"
                        self._tell(f"{signal.Signals(number).name}: {told}")
                    elif count > 1 and not self._seen_twice.wait(_PATIENCE) and not self._over.is_set():
                        _end_now()


def _end_now() -> None:
    on = _CURSOR_ON if sys.stderr.isatty() else ""
    sys.stderr.write(f"\n{on}oomph: ended in the middle of a step; what was saved before is as it was\n")
    sys.stderr.flush()
    os._exit(ENDED)
