"""A training whose loss goes wrong at a pass of one's choosing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oomph.training import run
from oomph.training.workloads import workload

Fault = Callable[[nn.Module, Tensor], Tensor]


def nan_loss(model: nn.Module, loss: Tensor) -> Tensor:
    return loss * float("nan")


def nan_gradients(model: nn.Module, loss: Tensor) -> Tensor:
    """The loss stays as it is; the root of 0 has no finite slope."""
    first = next(each for each in model.parameters() if each.requires_grad)
    return loss + (first * 0).sum().sqrt()


def out_of_memory(model: nn.Module, loss: Tensor) -> Tensor:
    torch.rand(3)  # as a pass that got some way: it has drawn from the generator
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB free.")


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Fault, *passes: int) -> None:
    """From now on training passes of these numbers (1 is the first) go wrong; evaluation is left alone."""
    count = 0

    def faulty(config: Any, **options: Any) -> Any:
        plain = workload(config, **options)

        def loss(model: nn.Module, batch: Any) -> Tensor:
            nonlocal count
            count += 1
            found = plain.loss(model, batch)
            return fault(model, found) if count in passes else found

        return replace(plain, loss=loss)

    monkeypatch.setattr(run, "workload", faulty)
