"""How a run ends when it cannot continue: out of memory, or a loss that is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oomph.errors import UserError, is_out_of_host_memory
from oomph.torch_internals import tree_leaves
from oomph.units import format_bytes
from oomph_lab.training.libraries import need
from oomph_lab.training.step import StepResult

_MOST_SAVED_BATCHES = 20


class NotFinite(UserError):
    """A loss, gradients or weights are not finite."""


class OutOfMemory(UserError):
    """The device ran out of memory. saved: the step of the checkpoint, None if it could not be saved."""

    def __init__(self, error: str, held: list[tuple[str, int]], saved: int | None, why_not: str) -> None:
        self.held, self.saved = held, saved
        state = f"the state is saved at step {saved}" if saved is not None else f"not saved: {why_not}"
        first = " ".join(error.split(". ")[:2]).strip()
        parts = "; ".join(f"{name} {format_bytes(size)}" for name, size in held if size > 0)
        super().__init__(f"out of memory ({first}); {f'in use: {parts}; ' if parts else ''}{state}")


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU or of the host. Libraries that allocate for themselves raise a RuntimeError with one of these
    texts."""
    texts = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
    out_of_memory = isinstance(error, torch.OutOfMemoryError) or is_out_of_host_memory(error)
    return out_of_memory or any(text in str(error) for text in texts)


def memory_in_use(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, graph_bytes: int = 0
) -> list[tuple[str, int]]:
    """Bytes of the device by owner."""
    parameters = list(model.parameters())
    held = [
        ("parameters", _bytes(parameters, device)),
        ("buffers", _bytes(model.buffers(), device)),
        ("gradients", _bytes((each.grad for each in parameters if each.grad is not None), device)),
        ("optimizer state", _bytes(tree_leaves(dict(optimizer.state)), device)),
    ]
    if device.type != "cuda":
        return held
    allocated = torch.cuda.memory_allocated(device)
    return [
        *held,
        ("activations and temporaries", allocated - sum(size for _, size in held)),
        ("CUDA graphs", graph_bytes),
        ("reserved and unused", torch.cuda.memory_reserved(device) - allocated - graph_bytes),
    ]


def _bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Each storage once: tied weights share theirs."""
    storages: dict[int, int] = {}
    for each in tensors:
        if isinstance(each, Tensor) and each.device.type == device.type:
            try:
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a wrapper subclass without a storage
                storages[id(each)] = each.numel() * each.element_size()
    return sum(storages.values())


def describe_not_finite(result: StepResult) -> str:
    if result.grad_norm is not None and math.isfinite(result.loss):
        return f"the gradients of step {result.step} were not finite (norm {result.grad_norm})"
    return f"the loss of step {result.step} was {result.loss}"


def save_batches(folder: Path, result: StepResult) -> str:
    """Save the batches of a failed step as safetensors, at most 20 files per run; return where they are."""
    file = folder / f"batch_of_step_{result.step:08}.safetensors"
    if not file.exists() and sum(1 for _ in folder.glob("batch_of_step_*")) >= _MOST_SAVED_BATCHES:
        return f"its batch is not saved, since {_MOST_SAVED_BATCHES} others are"
    tensors = {
        # Copies, since labels are often the same tensor as the tokens, which the format refuses.
        f"{number}.{name}": tensor.contiguous().clone()
        for number, batch in enumerate(result.batches)
        for name, tensor in batch.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    need("safetensors.torch", "saving a batch").save_file(tensors, file)
    return f"its batch is in {file}"
