"""What a program runs beside its main thread: loader workers, threads, and the ranks of a process group."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from oomph import torch_internals as internals
from oomph.prediction.cuda.rules import program_error
from oomph.prediction.isolation import refuse_in_thread
from oomph.prediction.tracer.fake_cuda import DEVICE, Patches
from oomph.prediction.tracer.tracer import Tracer
from oomph.torch_internals import FakeTensor, tree_leaves, tree_map
from oomph.units import MiB

_MODES = tuple[Any, ...]
_NCCL_VERSION = (2, 28, 9)  # that torch 2.11 comes with


def install_workers(patches: Patches, tracer: Tracer, modes: _MODES) -> None:
    """Run all of these in the traced thread and process, or with the trace's modes."""
    _load_data_in_process(patches, tracer, modes[0])
    _trace_threads(patches, tracer, modes)
    _call_replicas_directly(patches)
    _spawn_one_process_directly(patches, tracer)
    if torch.distributed.is_available():
        _make_fake_process_groups(patches, tracer)
        _replace_distributed_data_parallel(patches, tracer)


def _load_data_in_process(patches: Patches, tracer: Tracer, placement: Any) -> None:
    """Workers and pinning threads change nothing on the GPU; they could not return fake tensors."""
    iterator = getattr(*internals.DATA_LOADER_ITERATOR)
    start = threading.Thread.start

    def get_iterator(loader: DataLoader[Any]) -> Any:
        tracer.loader_workers = max(tracer.loader_workers or 0, loader.num_workers)
        alone = copy.copy(loader)
        alone.num_workers, alone.timeout, alone.pin_memory = 0, 0, False
        alone.prefetch_factor = None
        if tracer.batch_sizes is not None:
            tracer.batch_sizes.look_through(loader.dataset)
            lengthen, collate = tracer.batch_sizes.with_lengths, loader.collate_fn
            vars(alone)["collate_fn"] = lambda samples: lengthen(collate(samples))
        if not isinstance(loader.dataset, IterableDataset) and placement.default is None:
            vars(alone)["dataset"] = _Samples(loader.dataset, start)
        made = iterator(alone)
        tracer.training.data_loaders.add(made)
        return made

    patches.set(*internals.DATA_LOADER_ITERATOR, get_iterator)
    # Warns of more workers than this machine has cores; the one with the GPU may have them.
    patches.set(DataLoader, "check_worker_number_rationality", lambda loader: None)


class _Samples:
    """Makes the samples of a data set in a thread that is not traced: tracing an op takes longer than running
    it on a sample. A data set that takes fake tensors or the GPU is traced."""

    def __init__(self, dataset: Any, start: Callable[[threading.Thread], None]) -> None:
        self._dataset, self._start = dataset, start
        self._traced = False
        self._depth = 2  # of the first samples, which may be objects such as graphs

    def __getitem__(self, index: Any) -> Any:
        return self._make(lambda: self._dataset[index])

    def __getitems__(self, indices: Any) -> Any:
        get_items = getattr(self._dataset, "__getitems__", None)
        return self._make(lambda: get_items(indices) if get_items else [self._dataset[i] for i in indices])

    def _make(self, make: Callable[[], Any]) -> Any:
        if not self._traced:
            made: list[Any] = []
            thread = threading.Thread(target=self._run, args=(make, made, refuse_in_thread()))
            self._start(thread)
            thread.join()
            if made:
                return made[0]
            self._traced = True  # from now on; an error of the data set's own is raised again
        return make()

    def _run(self, make: Callable[[], Any], made: list[Any], refuse: Callable[[], None]) -> None:
        refuse()
        with contextlib.suppress(BaseException):
            samples = make()
            if not any(_needs_trace(each, self._depth) for each in tree_leaves(samples)):
                made.append(samples)
                self._depth = 0


def _needs_trace(value: Any, depth: int) -> bool:
    """Whether it is a fake tensor or on the GPU, or an object with one among its attributes, so deep."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor) or value.device.type != "cpu"
    fields = getattr(value, "__dict__", None) if depth else None
    return bool(fields) and any(_needs_trace(each, depth - 1) for each in tree_leaves(fields))


def _trace_threads(patches: Patches, tracer: Tracer, modes: _MODES) -> None:
    """torch's modes belong to one thread: the program's threads enter those of the trace."""
    start = threading.Thread.start

    def start_traced(thread: threading.Thread) -> None:
        if threading.get_ident() in tracer.threads:
            run, refuse = thread.run, refuse_in_thread()

            def traced() -> None:
                refuse()
                tracer.threads.add(threading.get_ident())
                with modes[0], modes[1]:
                    run()

            thread.run = traced  # type: ignore[method-assign]
        start(thread)

    patches.set(threading.Thread, "start", start_traced)


def _spawn_one_process_directly(patches: Patches, tracer: Tracer) -> None:
    """torch.multiprocessing.spawn(main, nprocs=...), or set_start_method("spawn") and a Process(target=main)
    for each GPU, as scripts for several GPUs start themselves."""
    spawn, start = torch.multiprocessing.spawn, BaseProcess.start
    get_real_start_method = multiprocessing.get_start_method
    start_method: list[str] = []
    started: list[Any] = []  # programs: a further process of one of them is another rank, which is not traced

    @functools.wraps(spawn)
    def spawn_directly(fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
        return fn(0, *args) if nprocs in (1, tracer.ranks) else spawn(fn, args, nprocs, *rest, **kwargs)

    def set_start_method(method: str, force: bool = False) -> None:
        multiprocessing.get_context(method)  # there is one
        start_method[:] = [method]  # not really: the first lock of "spawn" starts a process

    def get_start_method(allow_none: bool = False) -> str | None:
        return start_method[0] if start_method else get_real_start_method(allow_none)

    def start_directly(process: Any) -> None:
        helps = process.daemon or any(map(_communicates, tree_leaves((process._args, process._kwargs))))
        if start_method != ["spawn"] or process._start_method is not None or helps:
            return start(process)
        process._popen = _Ended()
        program = process._target or type(process)
        program = getattr(program, "func", program)  # of a functools.partial
        if program not in started:
            started.append(program)
            with contextlib.suppress(SystemExit):
                process.run()

    patches.set(torch.multiprocessing, "spawn", spawn_directly)
    patches.set(BaseProcess, "start", start_directly)
    patches.set(FakeTensor, "share_memory_", lambda tensor: tensor)
    for module in (multiprocessing, torch.multiprocessing):
        patches.set(module, "set_start_method", set_start_method)
        patches.set(module, "get_start_method", get_start_method)


class _Ended:
    """What a `Process` asks of a process that has ended."""

    pid = returncode = 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def close(self) -> None:
        pass

    poll = wait
    terminate = kill = close


def _communicates(argument: Any) -> bool:
    """Queues, pipes and events: such a process works with this one."""
    return type(argument).__module__.split(".")[0] in ("multiprocessing", "_multiprocessing")


def _call_replicas_directly(patches: Patches) -> None:
    """nn.DataParallel on one GPU: inputs are moved there, and the module is called."""

    patches.set(nn.DataParallel, "forward", _call_on_gpu)


def _call_on_gpu(self: Any, *inputs: Any, **kwargs: Any) -> Any:
    def moved(value: Any) -> Any:
        return value.to(DEVICE) if isinstance(value, torch.Tensor) else value

    return self.module(*tree_map(moved, inputs), **tree_map(moved, kwargs))


# ---------------------------------------------------------------------------------------------- ranks


def _make_fake_process_groups(patches: Patches, tracer: Tracer) -> None:
    """One rank is traced; what it would exchange with others changes nothing in its memory."""
    for module in (torch.cuda, torch.accelerator):
        patches.set(module, "device_count", lambda: gpus_of_node(tracer.ranks))
    init = torch.distributed.init_process_group

    @functools.wraps(init)
    def init_process_group(backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any) -> None:
        tracer.has_process_group = True
        _replace_fsdp_functions(patches)
        if backend == "fake":  # as many ranks as the program pretends to have
            return init(backend, init_method, *args, **kwargs)
        size, rank = (
            int(os.environ.get(variable, default)) if given in (-1, None) else given
            for given, variable, default in (
                (kwargs.get("world_size"), "WORLD_SIZE", 1),
                (kwargs.get("rank"), "RANK", 0),
            )
        )
        if size not in (1, tracer.ranks):
            message = f"a process group of {size} ranks was asked for, not of {tracer.ranks}"
            raise program_error(RuntimeError(f"{message}; give --ranks {size}"))
        # The fake process group of torch 2.11 leaves the tensors of these as they are.
        patches.set(torch.distributed, "gather_object", _gather_object)
        patches.set(torch.distributed, "scatter_object_list", _scatter_object_list)
        if size > 1:
            _accept_checkpoints_of_one_rank(patches)
        internals.init_fake_process_group(size, rank, init)

    distributed = torch.distributed
    for module in (distributed, distributed.distributed_c10d, distributed.device_mesh):
        patches.set(module, "init_process_group", init_process_group)
    # Programs ask this before they use bfloat16. torch's own functions still see the build's answer.
    patches.set(distributed, "is_nccl_available", lambda: True)
    patches.set(torch.cuda.nccl, "version", lambda: _NCCL_VERSION)


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


def gpus_of_node(ranks: int) -> int:
    """As many as a node has, eight at most, if all nodes have the same number."""
    return next(number for number in range(8, 0, -1) if ranks % number == 0)


def _replace_distributed_data_parallel(patches: Patches, tracer: Tracer) -> None:
    """DDP's reducer is written in C++ for real tensors. What it allocates are its buckets of gradients."""
    ddp = nn.parallel.DistributedDataParallel

    def init(self: Any, module: nn.Module, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        self.module, self.device_ids = module, device_ids
        self.device = next((p.device for p in module.parameters()), None)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = False
        self.gradient_as_bucket_view = kwargs.get("gradient_as_bucket_view", False)
        self._cap_mb = kwargs.get("bucket_cap_mb") or 25
        self._buckets = _Buckets(module, self._cap_mb, tracer)
        self._replaced_buckets = None
        self._may_be_held = []  # ids of buckets, in the second forward
        self._has_reduced = False
        self._will_rebuild = bool(kwargs.get("static_graph")) or not kwargs.get("find_unused_parameters")
        ranks = torch.distributed.get_world_size(kwargs.get("process_group"))

        def reduce(parameter: torch.Tensor) -> None:
            if not self.require_backward_grad_sync:
                return
            self._replaced_buckets = None
            tracer.freed_at_last.update(dict.fromkeys(self._may_be_held, len(tracer.recorder.events)))
            self._may_be_held = []
            self._has_reduced = True
            if self.gradient_as_bucket_view:
                parameter.grad = self._buckets.view(parameter)
            if ranks > 1:
                tracer.work.collective(2 * parameter.nbytes * (ranks - 1) // ranks, ranks, "backward")

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(reduce)

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        # After the first backward the buckets are made again, in the order in which gradients came. NCCL's
        # watchdog, which looks every 100 ms, keeps the old ones until the next backward, unless the program
        # takes its time to get a batch from a loader. Workers may have the batch ready.
        if self._will_rebuild and self._has_reduced and torch.is_grad_enabled():
            self._will_rebuild = False
            self._replaced_buckets, self._buckets = self._buckets, None
            if tracer.loader_workers is None:
                tracer.note_once("DDP: in the second forward, NCCL may still hold the first buckets")
            else:
                self._may_be_held = self._replaced_buckets.ids if tracer.loader_workers else []
                self._replaced_buckets = None
            self._buckets = _Buckets(self.module, self._cap_mb, tracer)
        if self.device_ids:
            return _call_on_gpu(self, *inputs, **kwargs)
        return self.module(*inputs, **kwargs)

    def set_static_graph(self: Any) -> None:
        self._will_rebuild = True

    patches.set(ddp, "__init__", init)
    patches.set(ddp, "forward", forward)
    patches.set(ddp, "register_comm_hook", lambda *args, **kwargs: None)
    patches.set(ddp, "_set_static_graph", set_static_graph)


class _Buckets:
    """One buffer for about `cap_mb` of gradients of a dtype; the first holds 1 MiB."""

    def __init__(self, module: nn.Module, cap_mb: float, tracer: Tracer) -> None:
        self._views: dict[torch.Tensor, torch.Tensor] = {}
        self.ids: list[int] = []
        self._tracer = tracer
        filled: dict[Any, list[torch.Tensor]] = {}  # of dtype and device: parameters of the open bucket
        for parameter in module.parameters():
            if not parameter.requires_grad:
                continue
            key = parameter.dtype, parameter.device
            filled.setdefault(key, []).append(parameter)
            size = sum(each.nbytes for each in filled[key])
            if size >= (cap_mb if self._views else 1) * MiB:
                self._add(filled.pop(key))
        for parameters in filled.values():
            self._add(parameters)

    def _add(self, parameters: list[torch.Tensor]) -> None:
        sizes = [each.numel() for each in parameters]
        bucket = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        allocation = self._tracer.recorder.allocation_of(bucket)
        if allocation is not None:
            allocation.kind = "gradient"
            self.ids.append(allocation.id)
        self._views.update(zip(parameters, bucket.split(sizes), strict=True))

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        return self._views[parameter].view_as(parameter)
