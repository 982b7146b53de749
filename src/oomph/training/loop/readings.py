"""What a step did, read from the device without waiting for it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BEHIND = 2  # steps that may be under way before the oldest is waited for


@dataclass(frozen=True)
class Reading:
    """step: 1 is the first. `sound` False: its update was not made, or, in backward, should not have been."""

    step: int
    loss: float
    norm: float | None
    sound: bool
    batches: Any  # those of the step, on the host


class Readings:
    """Numbers on their way to the host: two or three a step, copied behind the step's own work."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None, Any]] = deque()

    def put(self, step: int, loss: Tensor, norm: Tensor | None, doubt: Tensor, batches: Any) -> None:
        """doubt: 0, or nan where the step was not made."""
        parts = [loss, doubt] if norm is None else [loss, doubt, norm]
        numbers = torch.stack([part.detach().to(torch.float32).reshape(()) for part in parts])
        event = None
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            numbers, event = host, torch.cuda.Event()
            event.record()
        self._waiting.append((step, numbers, event, batches))

    def take(self, all_of_them: bool = False) -> list[Reading]:
        """Those that have arrived, oldest first."""
        found = []
        while self._waiting:
            step, numbers, event, batches = self._waiting[0]
            if event is not None and not event.query():
                if not all_of_them and len(self._waiting) <= _BEHIND:
                    break
                event.synchronize()
            self._waiting.popleft()
            loss, doubt, *norm = numbers.tolist()
            found.append(Reading(step, loss, norm[0] if norm else None, doubt == 0, batches))
        return found
