"""The streams on which copies run beside a GPU's computation. On a CPU a copy is done when it is called."""

from __future__ import annotations

from collections.abc import Callable

import torch

Done = torch.cuda.Event | None  # None: done already


class Lanes:
    """One stream for copies to the host, one for copies back: a GPU has an engine for each direction.

    Nothing here waits on the host, and no memory is freed or reused at a moment that depends on how fast a
    copy is: streams wait for one another where the program says so.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._back = torch.cuda.Stream(device) if on_gpu else None

    def copy_out(self, copy: Callable[[], None]) -> Done:
        """Copy to the host what the current stream has made so far.

        The host memory may be one that is still being read for an earlier copy back.
        """
        if self._out is None or self._back is None:
            copy()
            return None
        self._out.wait_stream(self._back)
        return self._run(self._out, copy)

    def copy_back(self, copy: Callable[[], None], copied_out: Done) -> Done:
        """Copy into memory that was allocated on the current stream, which may have used it before."""
        if self._back is None:
            copy()
            return None
        if copied_out is not None:
            self._back.wait_event(copied_out)
        return self._run(self._back, copy)

    def wait(self, done: Done) -> None:
        """What the current stream does from here on comes after the copy."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def _run(self, stream: torch.cuda.Stream, copy: Callable[[], None]) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            copy()
        return stream.record_event()  # type: ignore[no-any-return]
