"""Ctrl-C, SIGTERM, a closed terminal: the step under way is finished and saved. A second one ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from oomph.training.signals import STOPPING


class Stopping:
    """`with Stopping() as stopping:`; `stopping.asked` is the signal's name once there was one."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
