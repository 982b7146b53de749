"""Small programs that the tests of a trace share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import oomph
from oomph import Prediction, Workload

MiB = 1 << 20


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def workload(model: Callable[[], Any] = lambda: nn.Linear(64, 64), **changes: Any) -> Workload:
    options = {
        "model": model,
        "batch": lambda device: torch.randn(32, 64, device=device),
        "loss": mean_square,
    }
    return Workload(**options | changes)


def predict_step(step: Callable[[nn.Module, torch.Tensor], Any], width: int = 64) -> Prediction:
    """Predict a program whose step is `step(model, x)`, on the GPU."""

    def train() -> Callable[[], None]:
        model = nn.Linear(width, width).cuda()
        x = torch.randn(32, width, device="cuda")
        return lambda: step(model, x)

    return oomph.predict(train, gpu="h200")


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return next(start + index for index, line in enumerate(lines) if text in line)


def notes_of(prediction: Prediction) -> str:
    return "\n".join(note.text for note in prediction.notes)
