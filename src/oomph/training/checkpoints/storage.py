"""Where torch.distributed.checkpoint puts tensors, and where it gets them from.

Its own FileSystemReader unpickles: the file `.metadata` with plain `pickle.load`, whatever is not a tensor
with `torch.load(weights_only=False)`. Both execute what a stranger wrote there. Its writer of safetensors has
a whole file in memory, twice, before the first byte is on disk. So its planners are used here with a storage
of our own: one safetensors file of tensors. Only tensors go through it, the rest of a state is JSON
(tree.py), and no file of a checkpoint is ever unpickled.

Saving has two halves. `Collector` is what `save` writes to: it takes each tensor of the plan, copied to the
host or as it is. Writing them to disk (tensor_file.py) needs nothing of torch.distributed.checkpoint and may
be in a thread. That matters: `save` warns when there is no process group, and warnings cannot be silenced in
one thread without touching the others. `async_save` would warn, and copy, in the same way.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from oomph.training.checkpoints.tensor_file import Entry, Malformed, read_header, read_into

_KEY = "tensors"
Stage = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def collect(tensors: dict[str, Tensor], stage: Stage) -> dict[str, Tensor]:
    """What the planner of torch.distributed.checkpoint wants written, as `stage` copied it."""
    writer = Collector(stage)
    # Under one key, which the planner takes off again: `save` logs each key that it is given, at 0.2 ms.
    nested = {_KEY: tensors}
    planner = DefaultSavePlanner(flatten_state_dict=True)
    _quietly(lambda: dcp.save(nested, storage_writer=writer, planner=planner, no_dist=True))
    return writer.collected


def fill(targets: dict[str, Tensor], path: Path) -> None:
    """Read the file's tensors into `targets`, which have its names and shapes."""
    reader = Reader(path)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _quietly(lambda: dcp.load(dict(targets), storage_reader=reader, planner=planner, no_dist=True))


def _quietly(call: Callable[[], Any]) -> None:
    """Without the warning that there is no process group; what failed inside is raised as it was."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            call()
    except CheckpointException as failed:  # not an Exception: it would pass every handler
        cause = next(iter(failed.failures.values()))[0]
        raise cause from None


class Collector(StorageWriter):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.collected: dict[str, Tensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.collected = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        wanted: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            tensor = planner.resolve_data(item)
            # What is not a tensor would be pickled; tree.py has kept all that apart.
            assert item.type is WriteItemType.TENSOR
            assert isinstance(tensor, Tensor)
            wanted[item.index.fqn.removeprefix(f"{_KEY}.")] = tensor.detach()
            results.append(WriteResult(item.index, tensor.numel() * tensor.dtype.itemsize, None))
        self.collected = self.stage(wanted)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The header of the tensor file says all that `metadata` does."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.entries = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.entries = read_header(self.path)
        return Metadata({name: _described(entry) for name, entry in self.entries.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The entries were read with the metadata."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = sorted(plan.items, key=lambda item: self.entries[item.storage_index.fqn].start)
        with FileIO(self.path) as file:
            for item in items:
                entry = self.entries[item.storage_index.fqn]
                target = planner.resolve_tensor(item).detach()
                if item.type is not LoadItemType.TENSOR or target.shape != entry.shape:
                    raise Malformed(f"does not hold {item.storage_index.fqn} as one tensor")
                read_into(file, entry, target)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _described(entry: Entry) -> TensorStorageMetadata:
    shape = torch.Size(entry.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(TensorProperties(dtype=entry.dtype), shape, [whole])
