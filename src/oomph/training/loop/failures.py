"""How a run ends when it cannot go on: what happened, what is kept, what to do."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from oomph.errors import UserError
from oomph.training.loop.memory import alive_text
from oomph.training.loop.readings import Reading

_MOST_BATCHES = 20


class NotFinite(UserError):
    """A loss or gradients that are no numbers."""


class OutOfMemory(UserError):
    """A real one, in spite of the prediction. `saved`: the step that is saved, None where none could be."""

    def __init__(self, error: str, held: list[tuple[str, int]], saved: int | None, why_not: str) -> None:
        self.held, self.saved = held, saved
        kept = f"the state is saved at step {saved}" if saved is not None else f"not saved: {why_not}"
        first = " ".join(error.split(". ")[:2]).strip()
        there = f"alive were {alive_text(held)}; " if held else ""
        super().__init__(f"out of memory ({first}); {there}{kept}")


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Torch's allocator says so by a class of its own; libraries that allocate for themselves, in words."""
    words = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def not_finite_text(reading: Reading) -> str:
    if reading.norm is not None and math.isfinite(reading.loss):
        return f"the gradients of step {reading.step} were not finite (norm {reading.norm})"
    return f"the loss of step {reading.step} was {reading.loss}"


def save_batches(folder: Path, reading: Reading) -> str:
    """The batches of a step that failed, for a look at them: safetensors, one entry per tensor. Returns where
    they are; a run that leaves many steps out does not fill the disk with them."""
    from oomph.training.data.needs import need

    file = folder / f"batch_of_step_{reading.step:08}.safetensors"
    if not file.exists() and sum(1 for _ in folder.glob("batch_of_step_*")) >= _MOST_BATCHES:
        return f"its batch is not saved, those of {_MOST_BATCHES} others are"
    tensors = {
        f"{number}.{name}": tensor.contiguous()
        for number, batch in enumerate(reading.batches)
        for name, tensor in batch.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    need("safetensors.torch", "saving a batch").save_file(_apart(tensors), file)
    return f"its batch is in {file}"


def _apart(tensors: dict[str, object]) -> dict[str, object]:
    """Labels are often the same tensor as the tokens, and the format wants each in memory of its own."""
    return {name: tensor.clone() for name, tensor in tensors.items()}  # type: ignore[attr-defined]
