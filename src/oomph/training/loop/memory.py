"""What the device holds: in a line while training goes on, and in full when it has run out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from oomph.units import format_bytes


@dataclass(frozen=True)
class MemoryNow:
    allocated: int
    peak: int


def memory_now(device: torch.device, replay_bytes: int = 0, peak_before: int = 0) -> MemoryNow | None:
    """replay_bytes: of recorded passes, which the allocator does not count. peak_before: of what it has
    forgotten since."""
    if device.type != "cuda":
        return None
    allocated = torch.cuda.memory_allocated(device) + replay_bytes
    return MemoryNow(allocated, max(torch.cuda.max_memory_allocated(device), peak_before, allocated))


def alive(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, replay_bytes: int = 0
) -> list[tuple[str, int]]:
    """Who holds how many bytes of the device, the rest being what a step had made so far."""
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
    rest = allocated - sum(size for _, size in held)
    unused = torch.cuda.memory_reserved(device) - allocated - replay_bytes
    return [
        *held,
        ("activations and temporaries", rest),
        ("recorded passes", replay_bytes),
        ("reserved by the allocator, not in use", unused),
    ]


def alive_text(held: Iterable[tuple[str, int]]) -> str:
    return "; ".join(f"{name} {format_bytes(size)}" for name, size in held if size > 0)


def _bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Each storage once: tied weights share theirs."""
    storages: dict[int, int] = {}
    for each in tensors:
        if isinstance(each, Tensor) and each.device.type == device.type:
            try:
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):  # a wrapper without a storage of its own
                storages[id(each)] = each.numel() * each.element_size()
    return sum(storages.values())


def limit_memory(limit: int, device: torch.device) -> None:
    """No more than so many bytes for this process, as on a smaller card."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
