"""Autocast and, for float16, the scaling of the loss that keeps small gradients from becoming zeros."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Precision:
    def __init__(self, device: torch.device, autocast: torch.dtype | None) -> None:
        self.device, self.dtype = device, autocast
        half = autocast == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=half) if half else None

    def autocast(self, cached: bool = True) -> AbstractContextManager[Any]:
        """`cached`: keep the cast weights of a pass. Not while a pass is recorded for replaying: a replay
        must cast the weights of its own time."""
        kind = self.dtype or torch.bfloat16
        return torch.autocast(
            self.device.type,
            kind,
            enabled=self.dtype is not None,
            cache_enabled=cached and self.dtype is not None,
        )

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """So that clipping sees the gradients as they are."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """With a scaler, a step whose gradients overflowed is left out, and the next scale is smaller."""
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        self.scaler.update()

    def leave_out(self) -> None:
        """A step that is not made. The scaler must know, or it refuses the next one."""
        if self.scaler is not None:
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
