"""Activation offloading: what blocks save for backward moves to pinned host memory and back in time.

A tensor that a block saves is copied to the host at once, on a copy stream. Its device memory is freed when
the next block's forward has ended, whose computation hides the copy. In backward, a block's tensors are
prefetched when the backward of the block after it begins. The last block's tensors stay on the device:
backward begins with them.

Memory is allocated and freed at points that the program's order fixes, never at a point that depends on how
fast a copy is, so a prediction sees the allocations of a real run. `torch.autograd.graph.save_on_cpu` is not
used because it copies on the compute stream and pins new memory for every tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from oomph.errors import UserError
from oomph.fixes.journal import Journal, module_of
from oomph.fixes.modules import chosen_blocks, disable_kv_cache, own_checkpointing, refuse_own_checkpointing
from oomph.fixes.registry import Fix, FixContext, Target, bytes_option
from oomph.nn.blocks import block_names
from oomph.torch_internals import FakeTensor, current_graph_task_id, storage_id
from oomph.units import MiB

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, FakeTensor)


class ActivationOffloading(Fix):
    name = "activation_offloading"
    kind = "exact"
    changes = "What blocks save for backward moves to pinned host memory and is prefetched in backward."

    def targets(self, context: FixContext) -> Iterable[Target]:
        names = block_names(context.model)
        if len(names) > 2 and own_checkpointing(context.model) is None:
            yield Target(tuple(names[:-1]), {}, "the last block's tensors stay: backward begins with them")

    def change_model(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        blocks: Sequence[str] | None = None,
        smallest: int | str = MiB,
        ahead: bool = True,
    ) -> None:
        """`blocks`: names of modules ("layers.*.mlp" is one in each layer); by default every repeated block
        but the last, whose activations are needed at once. `smallest`: bytes of the smallest tensor that is
        copied. `ahead`: prefetch a block's tensors during the backward of the block after it; false saves
        their memory then, and the computation waits for each copy.

        With the fix "activation_checkpointing", a block saves its inputs alone, and those are copied; with
        `keep=attention`, the results of attention as well.
        """
        offloader = ActivationOffloader(bytes_option(self.name, "smallest", smallest), ahead)
        # Inside a checkpoint of the model's own, everything would be copied that is to be recomputed.
        refuse_own_checkpointing(model, self.name)
        wanted = chosen_blocks(model, blocks, self.name)
        repeated = block_names(model)
        named = wanted | (chosen_blocks(model, repeated, self.name) if repeated else {})
        # In the model's order. Repeated blocks that are not wanted are wrapped, too: they time the copies.
        order = [name for name, _ in model.named_modules() if name in named]
        last = order[-1] if len(order) > 1 else None
        offloaded = [name for name in order if name in wanted and name != last]
        if not offloaded:
            raise UserError(
                f"fix {self.name!r}: {last!r} is the last block, and backward needs its activations at once; "
                "name blocks before it"
            )
        for name in order:
            keep = name not in offloaded
            wrapper = partial(_offloaded, offloader=offloader, keep_on_device=keep)
            what = "times the copies of other blocks" if keep else "its activations wait on the host"
            journal.wrap_forward(named[name], wrapper, name, what)
        disable_kv_cache(model, journal, "it would hold on the device what is offloaded")


def _offloaded(
    forward: Callable[..., Any],
    *args: Any,
    offloader: ActivationOffloader,
    keep_on_device: bool,
    **kwargs: Any,
) -> Any:
    # Inside backward a checkpoint recomputes the block, and needs the result at once.
    if not torch.is_grad_enabled() or current_graph_task_id() != -1:
        return forward(*args, **kwargs)
    module = module_of(forward)
    own = [*module.parameters(), *module.buffers()] if module is not None else []
    block = offloader.begin_block(keep_on_device, own)
    outer, _running.block = current_block(), block
    try:
        with block.saved_tensors_hooks():
            result = forward(*args, **kwargs)
    finally:
        _running.block = outer
    block.end_forward()
    return result


_running = threading.local()  # .block: whose forward runs in this thread


def current_block() -> BlockActivations | None:
    """For what a block keeps beside autograd's graph: it may be offloaded, too."""
    return getattr(_running, "block", None)


class ActivationOffloader:
    """The state that the blocks of one model share. A copy of the model gets its own, empty."""

    def __init__(self, smallest: int, ahead: bool = True) -> None:
        self.smallest, self.ahead = smallest, ahead
        self.pool = PinnedBufferPool()
        self._streams: dict[torch.device, CopyStreams] = {}
        self.storages: weakref.WeakValueDictionary[int, OffloadedStorage] = weakref.WeakValueDictionary()
        self._last_block: weakref.ref[BlockActivations] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ActivationOffloader, (self.smallest, self.ahead)

    def begin_block(self, keep_on_device: bool, excluded: Collection[torch.Tensor]) -> BlockActivations:
        """A block's forward begins. `excluded`: its parameters and buffers, which are never copied."""
        block = BlockActivations(self, keep_on_device, excluded, self._last_block)
        self._last_block = weakref.ref(block)
        return block

    def offload(self, tensor: torch.Tensor) -> OffloadedStorage:
        """Start to copy the tensor's storage, once for all tensors that share it."""
        key = storage_id(tensor.untyped_storage())
        storage = self.storages.get(key)
        if storage is None or not storage.holds(tensor):
            streams = self._streams.setdefault(tensor.device, CopyStreams(tensor.device))
            storage = self.storages[key] = OffloadedStorage(tensor, streams, self.pool)
        return storage


class BlockActivations:
    """What one run of a block's forward saves for backward. The autograd graph owns it."""

    def __init__(
        self,
        offloader: ActivationOffloader,
        keep_on_device: bool,
        excluded: Collection[torch.Tensor],
        previous: weakref.ref[BlockActivations] | None,
    ) -> None:
        self._offloader = offloader
        self._keep_on_device = keep_on_device
        self._excluded = {storage_id(tensor.untyped_storage()) for tensor in excluded}
        self._device = next((tensor.device for tensor in excluded), None)
        self._previous_block = previous
        self._storages: list[weakref.ref[OffloadedStorage]] = []
        self._backward_began = False

    def saved_tensors_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def end_forward(self) -> None:
        """Free the previous block's device memory: this block's forward has hidden the copies."""
        previous = self._previous()
        if previous is not None:
            for storage in previous._alive():
                storage.free_device_memory()

    def pack(self, tensor: torch.Tensor) -> ResidentTensor | OffloadedTensor:
        with torch.no_grad():
            if self._keep_on_device or not self._may_be_offloaded(tensor):
                # Detached: an op's own result would hold the op, and the op would hold it.
                return ResidentTensor(tensor.detach(), tensor._version)
            storage = self._offloader.offload(tensor)
            if not any(known() is storage for known in self._storages):
                self._storages.append(weakref.ref(storage))
            return storage.save(tensor)

    def unpack(self, saved: ResidentTensor | OffloadedTensor) -> torch.Tensor:
        with torch.no_grad():
            if not self._backward_began:
                self._backward_began = True
                self._prefetch()  # has begun already, unless blocks run backward in another order
                previous = self._previous()
                if previous is not None and self._offloader.ahead:
                    previous._prefetch()
            return saved.tensor()

    def _prefetch(self) -> None:
        for storage in reversed(self._alive()):  # the last saved is needed first
            storage.prefetch()

    def _alive(self) -> list[OffloadedStorage]:
        return [storage for known in self._storages if (storage := known()) is not None]

    def _previous(self) -> BlockActivations | None:
        return None if self._previous_block is None else self._previous_block()

    def _may_be_offloaded(self, tensor: torch.Tensor) -> bool:
        """Large, plain, on the block's device, and neither a parameter nor a view of one."""
        if type(tensor) not in _PLAIN_TENSORS or tensor.layout is not torch.strided:
            return False
        if self._device is not None and tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= self._offloader.smallest and storage_id(storage) not in self._excluded


class OffloadedTensor(NamedTuple):
    """What autograd holds instead of an offloaded tensor: its layout in the storage."""

    storage: OffloadedStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> torch.Tensor:
        flat = self.storage.take()
        usable = flat.numel() - flat.numel() % self.dtype.itemsize
        return flat[:usable].view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class ResidentTensor(NamedTuple):
    """What autograd holds instead of a tensor that stays on the device."""

    value: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        if self.value._version != self.version:
            raise _modified_in_place(f"a tensor of shape {tuple(self.value.shape)}")
        return self.value


class OffloadedStorage:
    """One storage: on the device, being copied, on the host, or prefetched. Each save is taken once."""

    def __init__(self, tensor: torch.Tensor, streams: CopyStreams, pool: PinnedBufferPool) -> None:
        storage = tensor.untyped_storage()
        self._saves = self._takes_left = 0
        self._weak_storage, self._version = StorageWeakRef(storage), tensor._version
        self._streams, self._pool = streams, weakref.ref(pool)
        self._nbytes = storage.nbytes()
        self._pinned = streams.device.type == "cuda"
        self._host = pool.take(self._nbytes, self._pinned)
        self._device_bytes: torch.Tensor | None = _storage_bytes(tensor)
        self._is_original = True  # the device memory is the program's own, not a prefetched copy
        self._copied_to_host = streams.copy_to_host(self._copy_to_host)
        self._prefetched: torch.cuda.Event | None = None
        self._modified = False

    @property
    def on_device(self) -> bool:
        return self._device_bytes is not None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this is the tensor's storage, unmodified. Its address alone may belong to another now."""
        return not self._weak_storage.expired() and tensor._version == self._version

    def save(self, tensor: torch.Tensor) -> OffloadedTensor:
        self._saves += 1
        self._takes_left += 1
        shape, stride = tuple(tensor.shape), tensor.stride()
        return OffloadedTensor(self, tensor.dtype, shape, stride, int(tensor.storage_offset()))

    def free_device_memory(self) -> None:
        """Free it once the current stream is past the copy to the host."""
        self._streams.wait(self._copied_to_host)
        self._check_version()
        self._device_bytes = None

    def prefetch(self) -> None:
        """Allocate device memory and start to copy into it, unless it is on the device."""
        if self._device_bytes is None:
            self._device_bytes = torch.empty(self._nbytes, dtype=torch.uint8, device=self._streams.device)
            self._is_original = False
            self._prefetched = self._streams.copy_to_device(self._copy_to_device, self._copied_to_host)
            self._takes_left = self._saves

    def take(self) -> torch.Tensor:
        """The storage's bytes on the device. After the last save is taken, only the caller holds them."""
        self.prefetch()
        self._check_version()
        if self._modified:
            raise _modified_in_place(f"{self._nbytes} bytes that wait for backward on the host")
        taken = self._device_bytes
        assert taken is not None
        self._streams.wait(self._prefetched)
        self._prefetched = None
        self._takes_left -= 1
        if self._takes_left <= 0:
            self.free_device_memory()
        return taken

    def _check_version(self) -> None:
        """As autograd does: was the memory written to since it was saved, perhaps during the copy?"""
        if self._is_original and self._device_bytes is not None:
            self._modified |= self._device_bytes._version != self._version

    def _copy_to_host(self) -> None:
        for host, device in self._pieces():
            host.copy_(device, non_blocking=True)

    def _copy_to_device(self) -> None:
        for host, device in self._pieces():
            device.copy_(host, non_blocking=True)

    def _pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert self._device_bytes is not None
        pieces, start = [], 0
        for host in self._host:
            device = self._device_bytes[start : start + host.numel()]
            pieces.append((host[: device.numel()], device))
            start += host.numel()
        return pieces

    def __del__(self) -> None:
        # Prefetched and never taken: the copy must end before its memory is used for something else.
        if getattr(self, "_prefetched", None) is not None:
            self._streams.wait(self._prefetched)
        pool = self._pool() if hasattr(self, "_pool") else None
        if pool is not None and hasattr(self, "_host"):
            pool.give_back(self._host, self._pinned)


class CopyStreams:
    """One stream for copies to the host and one for copies back: a GPU has an engine for each direction.

    The host never waits; streams wait for each other. On a CPU, copies run when they are called.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._to_host = torch.cuda.Stream(device) if on_gpu else None
        self._to_device = torch.cuda.Stream(device) if on_gpu else None

    def copy_to_host(self, copy: Callable[[], None]) -> torch.cuda.Event | None:
        """Copy what the current stream has computed so far.

        The pinned buffer may still be read by an earlier copy to the device.
        """
        if self._to_host is not None and self._to_device is not None:
            self._to_host.wait_stream(self._to_device)
        return self._run(self._to_host, copy)

    def copy_to_device(
        self, copy: Callable[[], None], copied_to_host: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy into memory that was allocated on the current stream, which may have used it before."""
        if self._to_device is not None and copied_to_host is not None:
            self._to_device.wait_event(copied_to_host)
        return self._run(self._to_device, copy)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Make the current stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _run(self, stream: torch.cuda.Stream | None, copy: Callable[[], None]) -> torch.cuda.Event | None:
        if stream is None:  # torch.cuda.stream(None) would start CUDA
            copy()
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            copy()
        return stream.record_event()


class PinnedBufferPool:
    """Pinned host buffers, reused from step to step: pinning takes longer than copying.

    Buffers are powers of two of 1 MiB and more. torch rounds pinned memory up to a power of two, which would
    cost a 640 MiB tensor 1 GiB; in buffers of 512 and 128 MiB it costs 640 MiB.
    """

    def __init__(self) -> None:
        self.bytes = 0  # allocated in all
        self._free: defaultdict[tuple[int, bool], list[torch.Tensor]] = defaultdict(list)

    def take(self, size: int, pinned: bool) -> list[torch.Tensor]:
        """Buffers that hold `size` bytes together, in order, the largest first."""
        mebibytes = -(-size // MiB)
        bits = reversed(range(mebibytes.bit_length()))
        return [self._buffer(MiB << bit, pinned) for bit in bits if mebibytes >> bit & 1]

    def give_back(self, buffers: list[torch.Tensor], pinned: bool) -> None:
        """`pinned` as in `take`: Tensor.is_pinned asks the driver."""
        for buffer in buffers:
            self._free[buffer.numel(), pinned].append(buffer)

    def _buffer(self, size: int, pinned: bool) -> torch.Tensor:
        free = self._free[size, pinned]
        if free:
            return free.pop()
        self.bytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _modified_in_place(what: str) -> RuntimeError:
    """autograd's own error, which autograd cannot raise for tensors that it does not hold."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        + what
    )


def _storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage, as bytes: saved views may lie anywhere in it."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((elements,), (1,), 0).view(torch.uint8)
