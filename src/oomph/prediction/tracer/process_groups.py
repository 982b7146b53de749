"""torch.distributed for one rank: its groups have the program's backends by name, and exchange nothing.

What a rank would exchange with others changes nothing in its memory. Every backend is torch's fake one.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from oomph import torch_internals as internals
from oomph.prediction.ops.rules import program_error
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.tracer import Tracer


def install_process_groups(patches: Patches, tracer: Tracer) -> None:
    """One rank is traced."""
    distributed, c10d = torch.distributed, torch.distributed.distributed_c10d
    init = distributed.init_process_group

    def init_process_group(backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any) -> None:
        tracer.has_process_group = True
        _replace_fsdp_functions(patches)
        given = inspect.signature(init).bind(backend, init_method, *args, **kwargs).arguments
        if backend != "fake":  # which has as many ranks as the program pretends to have
            size, rank = (
                int(os.environ.get(variable, default)) if given.get(name, -1) in (-1, None) else given[name]
                for name, variable, default in (("world_size", "WORLD_SIZE", 1), ("rank", "RANK", 0))
            )
            if size not in (1, tracer.ranks):
                message = f"a process group of {size} ranks was asked for, not of {tracer.ranks}"
                raise program_error(RuntimeError(f"{message}; give --ranks {size}"))
            given |= {"world_size": size, "rank": rank, "init_method": None}
            given["store"] = given.get("store") or Store()
        if backend == "mpi":  # whose launcher gives the ranks, to builds with MPI
            given["backend"] = "fake"
        if given.get("world_size", 1) > 1:
            _accept_checkpoints_of_one_rank(patches)
        internals.load_fake_backend()
        init(**given)

    for module in (distributed, c10d, distributed.device_mesh):
        patches.set(module, "init_process_group", init_process_group)
    make_group = getattr(*internals.NEW_PROCESS_GROUP)

    def make_fake_group(*args: Any, **kwargs: Any) -> Any:
        """A group of the backends that were asked for, which torch then takes the fake one for."""
        given = inspect.signature(make_group).bind(*args, **kwargs).arguments
        given.update(dict.fromkeys(given.keys() & {"backend_options", "pg_options"}))
        with Patches() as fake:
            fake.set(c10d.BackendConfig, "get_device_backend_map", _fake_backends)
            group, _ = made = make_group(**given)
        if isinstance(group, distributed.ProcessGroup):
            internals.set_default_backend_of_fake(group)
        return made

    def split_group(
        parent_pg: Any = None,
        split_ranks: Any = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Without communicators, a group of the ranks that this one is split to."""
        parent = distributed.get_process_group_ranks(parent_pg or distributed.group.WORLD)
        rank = distributed.get_rank(parent_pg)
        for ranks in split_ranks or ():
            if rank in ranks:
                return distributed.new_group([parent[each] for each in ranks], timeout, group_desc=group_desc)
        return None

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if distributed.get_backend(group) != "gloo":
            raise ValueError("monitored_barrier is only implemented for GLOO backend.")

    # Objects travel as tensors, whose values are not followed.
    for module in (distributed, c10d):
        patches.set(module, "all_gather_object", _all_gather_object)
        patches.set(module, "broadcast_object_list", _keep_objects)
        patches.set(module, "gather_object", _gather_object)
        patches.set(module, "scatter_object_list", _scatter_object_list)
    patches.set(*internals.NEW_PROCESS_GROUP, make_fake_group)
    patches.set(*internals.PROCESS_GROUP_TIMEOUT, lambda timeout, group=None: None)
    patches.set(*internals.PROCESS_GROUP_WRAPPER, lambda wrapped_pg, **kwargs: wrapped_pg)  # of debug levels
    if c10d.default_pg_nccl_timeout is None:  # of a build for CPUs, which warns of it
        patches.set(c10d, "default_pg_nccl_timeout", ProcessGroupNCCL.Options()._timeout)
    for module in (distributed, c10d):
        patches.set(module, "split_group", split_group)
        for store in (TCPStore, FileStore):
            if hasattr(module, store.__name__):
                patches.set(module, store.__name__, store)
        patches.set(module, "monitored_barrier", monitored_barrier)
        patches.set(module, "is_nccl_available", lambda: True)
        if not hasattr(module, "ProcessGroupNCCL"):  # of a build for CPUs
            patches.set(module, "ProcessGroupNCCL", ProcessGroupNCCL, missing_ok=True)
    # torch draws these with the generator of the program.
    numbers = itertools.count(1)
    patches.set(*internals.WORK_NUMBER, lambda: next(numbers))
    internals.add_meta_collectives()
    _share_memory_symmetrically(patches)


def take_values_of_ranks(values: Any, func: Any, args: Sequence[Any]) -> None:
    """After a collective that gathers: every rank has the values of this one."""
    if func is torch.ops.c10d._allgather_base_.default:
        written, given = [args[0]], args[1]
    elif func is torch.ops.c10d.allgather_.default:
        written, given = args[0][0], args[1][0]
    else:
        return
    known = values.known(given)
    for each in written if known is not None else ():
        repeats = each.numel() // max(known.numel(), 1)
        values.set(each, known.reshape(-1).repeat(repeats).reshape(each.shape))


def _fake_backends(config: Any) -> dict[str, str]:
    return dict.fromkeys(config.device_backend_map, "fake")


class _OfFakeBackends(type):
    def __instancecheck__(cls, value: object) -> bool:
        return type(value).__name__ == "FakeProcessGroup"


class ProcessGroupNCCL(metaclass=_OfFakeBackends):
    """Stands for the class of a build with NCCL, which programs take their options from."""

    __module__ = "torch.distributed.distributed_c10d"

    class NCCLConfig:
        """Settings of a communicator: NCCL_CONFIG_UNDEF_INT where they were not given."""

        def __init__(self) -> None:
            names = "blocking cga_cluster_size min_ctas max_ctas net_name split_share comm_name traffic_class"
            vars(self).update(dict.fromkeys(names.split(), -(2**31)))

    class Options:
        """Of a process group."""

        backend = "nccl"

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = ProcessGroupNCCL.NCCLConfig()
            self._timeout = timedelta(minutes=10)
            self.split_from: Any = None
            self.split_color = 0
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""


class Store(torch.distributed.Store if torch.distributed.is_available() else object):  # type: ignore[misc]
    """Of one rank: it has what the rank has set, and waits for no other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        named = dict(zip(("host_name", "port"), args, strict=False)) | kwargs
        self.host, self.port = named.get("host_name", "localhost"), named.get("port", 0)
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._values.get(key, b"")

    def add(self, key: str, amount: int) -> int:
        count = int(self._values.get(key, b"0") or 0) + amount
        self._values[key] = str(count).encode()
        return count

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        expected, desired = (each.encode() if isinstance(each, str) else each for each in (expected, desired))
        if self._values.get(key, expected) == expected:
            self._values[key] = bytes(desired)
        return self._values[key]

    def append(self, key: str, value: Any) -> None:
        self._values[key] = self.get(key) + (value.encode() if isinstance(value, str) else bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        pass

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: Any) -> None:
        pass


class TCPStore(Store):
    __module__ = "torch._C._distributed_c10d"


class FileStore(Store):
    __module__ = "torch._C._distributed_c10d"


class _SymmetricMemory:
    """Stands for a tensor's memory on all ranks: others' buffers are like this rank's."""

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        self._tensor = tensor
        self.rank, self.world_size = (
            torch.distributed.get_rank(group),
            torch.distributed.get_world_size(group),
        )
        self.buffer_ptrs = [tensor.data_ptr()] * self.world_size
        self.buffer_size = tensor.untyped_storage().nbytes()

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        count = math.prod(sizes)
        return self._tensor.view(-1).view(dtype)[storage_offset : storage_offset + count].view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        pass

    put_signal = wait_signal = barrier


def _share_memory_symmetrically(patches: Patches) -> None:
    symmetric = internals.symmetric_memory()

    def empty(*size: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device or "cuda")

    def rendezvous(tensor: torch.Tensor, group: Any) -> _SymmetricMemory:
        if isinstance(group, str):
            group = internals.process_group_of(group)
        return _SymmetricMemory(tensor, group)

    patches.set(symmetric, "empty", empty)
    patches.set(symmetric, "rendezvous", rendezvous)


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Every rank has what this one has."""
    object_list[:] = [copy.deepcopy(obj) for _ in object_list]


def _keep_objects(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    """Of this rank, where it is the source."""


def _gather_object(obj: Any, object_gather_list: Any = None, *args: Any, **kwargs: Any) -> None:
    if object_gather_list is not None:  # on the first rank
        object_gather_list[:] = [obj] * len(object_gather_list)


def _scatter_object_list(
    scatter_object_output_list: list[Any], scatter_object_input_list: Any = None, *args: Any, **kwargs: Any
) -> None:
    scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]


def _accept_checkpoints_of_one_rank(patches: Patches) -> None:
    """torch.distributed.checkpoint warns of every tensor, and fails, where other ranks' parts are missing."""
    module, name = internals.checkpoint_validation()
    validate = getattr(module, name)

    def validate_nothing(global_plan: Any, metadata: Any) -> Any:
        return validate(global_plan, replace(metadata, state_dict_metadata={}))

    patches.set(module, name, validate_nothing)


def _replace_fsdp_functions(patches: Patches) -> None:
    """Shards are made when they are asked for. Buffers are replaced in their modules: small ones may hold
    values, and cannot take the data of a fake tensor."""
    chunks, managed_states, move_states = internals.fsdp_functions()
    if getattr(*chunks) is _Shards:  # of another process group in this trace
        return
    find, move = getattr(*managed_states), getattr(*move_states)
    owners: dict[int, tuple[nn.Module, str]] = {}

    def find_states(modules: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
        for module in modules:
            owners.update({id(buffer): (module, name) for name, buffer in module._buffers.items()})
        return find(modules, *args, **kwargs)

    def move_to_device(params: Any, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        move(params, [], device)
        for buffer in buffers:
            module, name = owners[id(buffer)]
            if buffer.device != device and buffer.device.type != "meta":
                module._buffers[name] = buffer.to(device)

    patches.set(*chunks, _Shards)
    patches.set(*managed_states, find_states)
    patches.set(*move_states, move_to_device)


class _Shards:
    """The shards of a parameter, each made when it is asked for: FSDP2 needs one or two of a thousand."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._size
        length = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)
