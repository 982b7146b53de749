"""Stand-ins for torch's streams and events: they do nothing, and tell who waits for whom.

A trace runs one op after the other. What would run side by side on a GPU, and where it would wait, follows
from the stream that each op was given to and from the waits between streams, in the program's order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

DEVICE = torch.device("cuda:0")
_numbers = itertools.count(1)  # 0 is the default stream, or no event
# Told of "record", "await", "wait" and "wait for all", with the stream and the event that they are about.
Listener = Callable[[str, int, int], None]


class Stream:
    """Its memory is counted as if all streams were one; its time is its own."""

    device = DEVICE
    device_index = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = next(_numbers)
        self._uses: list[UseStream] = []

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def __enter__(self) -> Stream:
        self._uses.append(UseStream(self))
        self._uses[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._uses.pop().__exit__()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        now.tell("wait", self.stream_id)

    def wait_stream(self, stream: Any) -> None:
        event = Event()
        event.record(stream)
        event.wait(self)

    def wait_event(self, event: Any) -> None:
        if isinstance(event, Event):  # else one of a real GPU, from before the trace
            event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.event_id = next(_numbers)

    def record(self, stream: Any = None) -> None:
        now.tell("record", (stream or now.current).stream_id, self.event_id)

    def wait(self, stream: Any = None) -> None:
        now.tell("await", (stream or now.current).stream_id, self.event_id)

    def synchronize(self) -> None:
        now.tell("wait", 0, self.event_id)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class UseStream:
    """As torch.cuda.stream: what runs inside is given to the stream; to None, where it would go anyway.

    A stream of a real GPU, from before the trace, will do: it is only asked for its number.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = now.current
        now.set_current(self._stream)

    def __exit__(self, *error: Any) -> None:
        now.current = self._before


class Streams:
    """The streams of one trace."""

    def __init__(self) -> None:
        self.default = Stream()
        self.default.stream_id = 0
        self.current: Any = self.default
        self.listener: Listener | None = None
        self.on_other: Callable[[], None] | None = None  # told when a stream other than the default is taken

    def tell(self, what: str, stream: int = 0, event: int = 0) -> None:
        if self.listener is not None:
            self.listener(what, stream, event)

    def set_current(self, stream: Any) -> None:
        if stream is None:
            return
        if self.on_other is not None and stream.stream_id not in (0, self.current.stream_id):
            self.on_other()
        self.current = stream


now = Streams()  # of the trace that runs; a trace puts its own here, and this one back
