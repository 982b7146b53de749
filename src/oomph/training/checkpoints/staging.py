"""The host's copy of a state, so that training goes on while a thread writes.

It costs the host one copy of the state, kept from the first save to `release`: a host that had room for it
once must have room at the next save anyway, and new memory would have to be touched page by page each time.
The GPU pays nothing, unless a tensor is strided with holes: such a one is made contiguous there first.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from oomph.training.checkpoints.tree import is_dense

_ALIGNED = 64  # bytes, enough for every dtype


class HostCopies:
    def __init__(self) -> None:
        self.memory: Tensor | None = None
        self.for_gpu = self.registered = False

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `tensors`. Those from a GPU are complete once the events of `copies_done` have come.

        GPU copies are queued on the current stream: whatever is queued after them, the next optimizer step
        first of all, runs after them, and the host does not wait. A stream of their own could overlap them
        with the next forward pass; on a link of 50 GB/s that is a third of a second for 16 GB, by arithmetic.
        """
        places, total = {}, 0
        for name, tensor in tensors.items():
            places[name] = total
            size = tensor.numel() * tensor.dtype.itemsize
            total += -(-size // _ALIGNED) * _ALIGNED
        from_gpu = any(tensor.is_cuda for tensor in tensors.values())
        memory = self._room_for(total, from_gpu)
        copies = {}
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.dtype.itemsize
            flat = memory[places[name] : places[name] + size].view(tensor.dtype)
            # Laid out as the source is, since the copy is then one transfer and needs no memory on the GPU.
            dense = is_dense(tensor)
            copy = flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape)
            copies[name] = copy.copy_(tensor, non_blocking=True)
        return copies

    def _room_for(self, size: int, from_gpu: bool) -> Tensor:
        if self.memory is None or self.memory.numel() < size or (from_gpu and not self.for_gpu):
            self.release()
            self.memory = torch.empty(size, dtype=torch.uint8)
            self.for_gpu = from_gpu
            if from_gpu and size:
                self._register(self.memory)
        return self.memory

    def _register(self, memory: Tensor) -> None:
        """Page-locked in place: torch's own pinned memory is rounded up to a power of two."""
        failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        self.registered = int(failed) == 0
        if not self.registered:
            # Copies are slower then, but right. CUDA reports the failure again with the next kernel: here.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")

    def release(self) -> None:
        if self.registered and self.memory is not None:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
        self.memory = None
        self.for_gpu = self.registered = False

    def __del__(self) -> None:
        self.release()


def copies_done(tensors: dict[str, Tensor]) -> list[torch.cuda.Event]:
    """One event for each GPU that `tensors` are on, that comes after what is queued there now."""
    events = []
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record()
            events.append(event)
    return events
