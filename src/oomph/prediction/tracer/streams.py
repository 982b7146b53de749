"""Streams and events of the fake GPU: they do nothing but report who waits for whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

DEVICE = torch.device("cuda:0")
T = TypeVar("T")


def named(module: str, name: str) -> Callable[[type[T]], type[T]]:
    """For a class that stands for one of torch's."""

    def change(cls: type[T]) -> type[T]:
        cls.__module__, cls.__name__, cls.__qualname__ = module, name, name
        return cls

    return change


numbers = itertools.count(1)  # 0 is the default stream, or no event
# Receives "record event", "wait event", "synchronize" and "synchronize device", with the stream and the
# event.
StreamListener = Callable[[str, int, int], None]


@named("torch", "Stream")
class AnyStream:
    """Stands for torch.Stream: it has memory pools and a timeline of its own."""

    device = DEVICE
    device_index = 0
    device_type = 1  # of CUDA

    def __init__(
        self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **kwargs: Any
    ) -> None:
        self.stream_id = next(numbers) if stream_id is None else stream_id
        self.priority = min(priority, 0)
        self._contexts: list[Any] = []

    @property
    def native_handle(self) -> int:
        return self.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def __enter__(self) -> Any:
        self._contexts.append(torch.cuda.stream(self))  # type: ignore[arg-type]
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    def __repr__(self) -> str:
        return f"torch.Stream device_type=cuda, device_index=0, stream_id={self.stream_id}"

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        streams.report("synchronize", self.stream_id)

    def wait_stream(self, stream: Any) -> None:
        event = AnyEvent()
        event.record(stream)
        event.wait(self)

    def wait_event(self, event: Any) -> None:
        if isinstance(event, AnyEvent):  # else one of a real GPU, from before the trace
            event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        event = event or self._event()
        event.record(self)
        return event

    def _event(self) -> AnyEvent:
        return AnyEvent()


@named("torch.cuda.streams", "Stream")
class Stream(AnyStream):
    """Stands for torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.cuda_stream:#x}>"

    def _event(self) -> AnyEvent:
        return Event()


@named("torch.cuda.streams", "ExternalStream")
class ExternalStream(Stream):
    """Stands for torch.cuda.ExternalStream, of a pointer."""

    def __init__(self, stream_ptr: int, device: Any = None, **kwargs: Any) -> None:
        super().__init__(stream_id=stream_ptr)


@named("torch", "Event")
class AnyEvent:
    """Stands for torch.Event."""

    device = DEVICE

    def __init__(self, device: Any = None, *, enable_timing: bool = False, **kwargs: Any) -> None:
        self.event_id = next(numbers)
        self._enable_timing = enable_timing

    def record(self, stream: Any = None) -> None:
        streams.report("record event", (stream or streams.current).stream_id, self.event_id)

    def wait(self, stream: Any = None) -> None:
        streams.report("wait event", (stream or streams.current).stream_id, self.event_id)

    def synchronize(self) -> None:
        streams.report("synchronize", 0, self.event_id)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        if not (self._enable_timing and getattr(end_event, "_enable_timing", True)):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return 1.0

    def __repr__(self) -> str:
        return f"torch.Event device_type=cuda, device_index=0, event_id={self.event_id}"


@named("torch.cuda.streams", "Event")
class Event(AnyEvent):
    """Stands for torch.cuda.Event."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(enable_timing=enable_timing)

    @property
    def cuda_event(self) -> int:
        return self.event_id

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> Event:
        return cls()

    def ipc_handle(self) -> bytes:
        return bytes(64)

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


class Streams:
    """The streams of one trace."""

    def __init__(self) -> None:
        self.default = Stream(stream_id=0)
        self.current: Any = self.default
        self.listener: StreamListener | None = None
        self.on_synchronize: Callable[[], None] | None = None
        self.devices = 1  # GPUs of the node
        self._numbers = {0: 0}  # stream id -> in the order of first use

    @property
    def several(self) -> bool:
        """Whether the program has used a stream beside the default one."""
        return len(self._numbers) > 1

    def number(self, stream: Any) -> int:
        return self._numbers.setdefault(stream.stream_id, len(self._numbers))

    def report(self, what: str, stream: int = 0, event: int = 0) -> None:
        if self.listener is not None:
            self.listener(what, stream, event)
        if self.on_synchronize is not None and what.startswith("synchronize"):
            self.on_synchronize()

    def set_current(self, stream: Any) -> None:
        if stream is not None:
            self.number(stream)
            self.current = stream


streams = Streams()  # of the trace that runs; replaced for its duration


def current_streams() -> Streams:
    return streams
