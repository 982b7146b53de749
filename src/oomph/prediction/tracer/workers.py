"""What a program runs beside its main thread: loader workers, threads and spawned processes."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from oomph import torch_internals as internals
from oomph.prediction.isolation import refuse_in_thread
from oomph.prediction.patches import Patches
from oomph.prediction.tracer.process_groups import install_process_groups
from oomph.prediction.tracer.tracer import Tracer
from oomph.torch_internals import FakeTensor, tree_leaves

_MODES = tuple[Any, ...]


def install_workers(patches: Patches, tracer: Tracer, modes: _MODES) -> None:
    """Run all of these in the traced thread and process, or with the trace's modes."""
    _load_data_in_process(patches, tracer, modes[0])
    _trace_threads(patches, tracer, modes)
    _spawn_one_process_directly(patches, tracer)
    if torch.distributed.is_available():
        install_process_groups(patches, tracer)


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
