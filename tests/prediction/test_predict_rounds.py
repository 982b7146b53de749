"""Accumulated batches: those that do what the one before did are counted, not traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from predict_samples import stack_workload
from small_programs import mean_square
from torch import nn

import oomph
from oomph.prediction.rounds import Rounds
from oomph.workload import MicroBatches, Workload

BATCHES = 7


def whole(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> oomph.Prediction:
    """With every batch traced."""
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "repeats", lambda self: False)
        return oomph.predict(workload, gpu="h200")


def forwards(prediction: oomph.Prediction) -> int:
    return sum(event.label == "forward" for event in prediction.events)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": None},
        {"micro_batches": MicroBatches(2)},
        {"autocast": "bfloat16"},
        {"optimizer": lambda params: torch.optim.SGD(params, momentum=0.9)},
    ],
    ids=["plain", "no optimizer", "micro-batches", "autocast", "momentum"],
)
def test_the_first_batches_tell_the_memory_and_the_time_of_all(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = replace(stack_workload(), accumulate=BATCHES, **options)
    parts = 1 if work.micro_batches is None else work.micro_batches.parts
    all_of_them, found = whole(work, monkeypatch), oomph.predict(work, gpu="h200")
    assert forwards(all_of_them) == 3 * BATCHES * parts
    assert forwards(found) <= 3 * 4 * parts
    assert (found.peak, found.fits, found.steps) == (all_of_them.peak, all_of_them.fits, all_of_them.steps)
    assert found.step_seconds == pytest.approx(all_of_them.step_seconds, rel=1e-9)
    assert found.work == all_of_them.work
    told = "the first few of a step's accumulated batches are traced: the others do the same"
    assert [note.text for note in found.notes if "accumulated" in note.text] == [told]


@pytest.mark.parametrize("more", [0, 1])
def test_a_model_that_keeps_something_of_every_batch_is_traced_to_its_end(more: int) -> None:
    """As much of each, or more and more."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)
            self.kept: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.layer(x)
            self.kept.append(out.new_zeros(1024 * (1 + more * len(self.kept))))
            return out

    work = Workload(Keeps, lambda device: torch.zeros(32, 64, device=device), mean_square, accumulate=BATCHES)
    found = oomph.predict(work, gpu="h200")
    assert forwards(found) == 3 * BATCHES
    assert not any("accumulated" in note.text for note in found.notes)


def test_few_batches_are_traced_without_a_remark() -> None:
    found = oomph.predict(replace(stack_workload(), accumulate=3), gpu="h200")
    assert forwards(found) == 3 * 3
    assert not any("accumulated" in note.text for note in found.notes)
