"""Batches through torchdata's stateful loader, in this process or in one of its own."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from oomph.errors import UserError
from oomph.training.data.needs import need
from oomph.training.data.packing import Batch
from oomph.training.signals import STOPPING

_BATCHES_AHEAD = 8  # of a worker: those of a step or two
_POSITION = "oomph_position"  # under which the loader's own state holds ours


class Stateful(Protocol):
    """A data set of whole batches that is its own iterator and knows where it stands."""

    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Dataset = TypeVar("Dataset", bound=Stateful)


@dataclass(frozen=True)
class _Failure:
    """A user's mistake met in a worker. Raised there, it would arrive with a traceback around it."""

    message: str


@dataclass(frozen=True)
class _Plain:
    """A batch from a worker, as bytes. A tensor would come as a file in shared memory, of which containers
    have little, with a connection made for each."""

    arrays: dict[str, Any]

    def tensors(self) -> Batch:
        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    def pin_memory(self) -> Batch:
        """The loader's thread looks for this name."""
        return {name: tensor.pin_memory() for name, tensor in self.tensors().items()}


class _Reported(IterableDataset[Any], Generic[Dataset]):
    """The data set as the loader sees it."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Batch | _Plain | _Failure:
        if get_worker_info() is None:
            return next(self.dataset)  # type: ignore[call-overload, no-any-return]
        try:
            return _Plain({name: tensor.numpy() for name, tensor in next(self.dataset).items()})  # type: ignore[call-overload]
        except UserError as error:
            return _Failure(str(error))

    def state_dict(self) -> dict[str, Any]:
        return {_POSITION: self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state[_POSITION])


def _left_to_the_run(run: int, worker: int) -> None:
    """A signal that stops a run goes to all its processes. The run needs its batches until its step is done,
    and then ends the worker itself. `run`: its process."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(run,), daemon=True).start()
    # Threads that are at work in a library's own code must not meet an interpreter that is taken apart.
    atexit.register(os._exit, 0)


def _end_with(run: int) -> None:
    """A run that was killed ends no worker, and one whose batches nobody reads would wait for ever."""
    while os.getppid() == run:
        time.sleep(1)
    os._exit(1)


class Batches(Generic[Dataset]):
    """What a training loop iterates over. Iterating again goes on where it stopped.

    The state is that of the data set alone, so a run that read in its own process can go on with a worker,
    and the other way round. `identity`: what must be the same when a state is loaded.
    """

    def __init__(self, dataset: Dataset, workers: int, identity: Mapping[str, Any]) -> None:
        self._loaders = need("torchdata.stateful_dataloader", "loading data")
        self._dataset = dataset
        self._workers = workers
        self._identity = dict(identity)
        self._loader: Any = None
        self._iterator: Any = None
        self.opened_by = os.getpid()
        _OPENED.add(self)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            if self._iterator is None:
                self._open()
            batch = next(self._iterator)
        except RuntimeError as error:
            if not str(error).startswith(("DataLoader worker", "Pin memory thread")):
                raise
            if self._iterator is not None:
                self._iterator._shutdown = True  # a thread that waits for the rest of a batch never ends
            raise UserError(
                f"the process that reads the data ended ({str(error).splitlines()[0].rstrip('.')}); go on "
                "with --resume, and data.workers=0 if the host has too little memory for it"
            ) from error
        if isinstance(batch, _Failure):
            raise UserError(batch.message)
        return batch.tensors() if isinstance(batch, _Plain) else batch

    def state_dict(self) -> dict[str, Any]:
        """A few numbers: where the next batch starts. Of the batches handed out, not of those read ahead."""
        loader = self._loader
        position = self._dataset.state_dict() if loader is None else _found(loader.state_dict())
        return {"identity": dict(self._identity), "position": dict(position)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, now in self._identity.items():
            then = state["identity"].get(name)
            if then != now:
                raise UserError(
                    f"the data are not those of the checkpoint: {name} was {then!r} and is {now!r}; "
                    "resume with the same data, or start a new run"
                )
        self.close()
        self._dataset.load_state_dict(dict(state["position"]))

    def _open(self) -> None:
        if self._workers:
            # The tokenizers' threads do not survive a fork, and the library would say so each time.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with warnings.catch_warnings():
            # torchdata 0.11 calls a counter that newer versions of torch no longer keep.
            warnings.filterwarnings("ignore", ".*set_vital", UserWarning)
            # A loader draws a seed for its workers when it is opened. It must not be the training's generator
            # that it draws from: a resumed run opens one more, and would have other dropout from there on.
            self._loader = self._loaders.StatefulDataLoader(
                _Reported(self._dataset),
                batch_size=None,
                num_workers=self._workers,
                prefetch_factor=_BATCHES_AHEAD if self._workers else None,
                # On a GPU: a thread takes batches from the worker and makes them ready to be copied there.
                pin_memory=bool(self._workers) and torch.cuda.is_initialized(),
                generator=torch.Generator().manual_seed(0),
                worker_init_fn=partial(_left_to_the_run, os.getpid()) if self._workers else None,
            )
        self._iterator = self._started()

    def _started(self) -> Iterator[Any]:
        """Without torch's watch over its workers, which raises in whatever the main thread is doing when one
        ends. Asking for a batch finds it out as well, and is where there is a step to go back to."""
        handling = torch.utils.data._utils.signal_handling
        watch = handling._set_SIGCHLD_handler
        handling._set_SIGCHLD_handler = _nothing
        try:
            started: Any = iter(self._loader)
        finally:
            handling._set_SIGCHLD_handler = watch
        if self._workers and not self._loader.pin_memory:
            # Only the worker writes there. While our own end is open, the rest of a batch that it was killed
            # over would be waited for without end.
            started._worker_result_queue._writer.close()
        return started  # type: ignore[no-any-return]

    def close(self) -> None:
        """Ends the worker. The next batch would start at the state loaded last."""
        workers = getattr(self._iterator, "_workers", ())
        self._iterator = self._loader = None
        for worker in workers:
            worker.kill()  # one that is busy with a batch was asked in vain


_OPENED: weakref.WeakSet[Batches[Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A program that ends waits for its processes, and a worker leaves signals to the run."""
    for batches in list(_OPENED):
        if batches.opened_by == os.getpid():  # not in a child that was forked, whose worker it is not
            batches.close()


def _nothing() -> None:
    pass


def _found(state: Any) -> dict[str, Any]:
    """Our position in the loader's state, which nests it differently with and without a worker."""
    for value in _dicts_below(state):
        if _POSITION in value:
            return value[_POSITION]  # type: ignore[no-any-return]
    raise KeyError(_POSITION)


def _dicts_below(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        yield state
        for value in state.values():
            yield from _dicts_below(value)
