"""The ranks of a run that torchrun starts: they check that they run the same, and share each batch.

Every rank reads all batches and works on its rows, so a config gives the same training on any number of
ranks, and a checkpoint of one number continues on another. The first rank writes files and messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oomph import __version__
from oomph.errors import ExitStatus, OomphError, UserError
from oomph.parallel import Parallel
from oomph.torch_internals import tree_map
from oomph_lab.training.config import TrainConfig

T = TypeVar("T")
# Ranks that start later than this, or leave others waiting longer, are taken to be lost.
START_TIMEOUT = timedelta(seconds=float(os.environ.get("OOMPH_START_TIMEOUT", 300)))


class LostRank(UserError):
    """Another rank ended."""


class OtherRankFailed(SystemExit):
    """The first rank has reported why; the others end with its status, silently."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run; with `parallel` None, the only one."""

    rank: int = 0
    parallel: Parallel | None = None

    @property
    def size(self) -> int:
        return 1 if self.parallel is None else self.parallel.ranks

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def replica(self) -> int:
        """Which of the groups of ranks that work on the same samples."""
        return 0 if self.parallel is None else self.rank // (self.parallel.tp * self.parallel.cp)

    def rows(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's rows of a batch of all. The last one of an epoch may be smaller."""
        if self.parallel is None:
            return batch
        rows = len(next(iter(batch.values())))
        if rows % self.parallel.replicas:
            raise UserError(f"a batch of {rows} rows cannot be divided over {self.parallel.replicas} ranks")
        own = self.parallel.rows(rows, self.rank)
        return {name: tensor[own] for name, tensor in batch.items()}

    def mean(self, tensor: Tensor) -> Tensor:
        if self.parallel is not None:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
            tensor /= self.size
        return tensor

    def any_signal(self, text: str | None) -> str | None:
        """The signal that one of the ranks has received: they get it at different times."""
        if self.parallel is None:
            return text
        length = torch.tensor([len(text or "")])
        dist.all_reduce(length, dist.ReduceOp.MAX)
        return text or ("another rank's signal" if length.item() else None)

    def broadcast(self, value: T) -> T:
        """The first rank's value, for all: ranks may read a file at different times."""
        if self.parallel is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The first rank goes first: it writes what the others then read."""
        if self.parallel is not None and not self.is_main_process:
            dist.barrier()
        yield
        if self.parallel is not None and self.is_main_process:
            dist.barrier()

    def seed(self, seed: int) -> None:
        """Dropout differs between samples, and not between ranks that share one."""
        if self.replica:
            torch.manual_seed((seed + self.replica * 0x9E3779B9) % 2**63)

    # -------------------------------------------------------------------------------- state

    def full_state(self, state: Any) -> Any:
        """Sharded tensors of a state gathered on the host of the first rank; others get none of them."""
        if self.parallel is None:
            return state

        def gathered(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and hasattr(leaf, "full_tensor"):
                full = leaf.detach().full_tensor()  # type: ignore[attr-defined]
                return full.cpu() if self.is_main_process else None
            return leaf

        return tree_map(gathered, state)

    def sharded_optimizer_state(self, state: Any, optimizer: torch.optim.Optimizer) -> Any:
        """A whole state as this rank holds it: sharded as the parameters are."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        parameters = [each for group in optimizer.param_groups for each in group["params"]]

        def shard(leaf: Any, like: Any) -> Any:
            if not isinstance(like, DTensor) or not isinstance(leaf, Tensor) or leaf.shape != like.shape:
                return leaf
            mesh = like.device_mesh
            made = distribute_tensor(leaf.to(mesh.device_type), mesh, like.placements, src_data_rank=None)
            local, own = made.to_local(), like.to_local().device  # offloaded shards are on the host
            if local.device == own:
                return made
            return DTensor.from_local(
                local.to(own), mesh, like.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
            )

        return {
            **state,
            "state": {
                number: {name: shard(leaf, parameters[number]) for name, leaf in each.items()}
                for number, each in state["state"].items()
            },
        }


ONE_PROCESS = Ranks()


def world_size() -> int:
    """Of the processes that torchrun started; 1 without it."""
    try:
        return int(os.environ.get("WORLD_SIZE", 1))
    except ValueError:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']!r} is not a number; torchrun sets it"
        ) from None


def restarted() -> bool:
    """Whether torchrun started this process again, because a rank has ended."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def parallel_of(config: TrainConfig, ranks: int, given: Parallel | None = None) -> Parallel:
    """The config's parallelism (or another) over so many ranks. Raises where they cannot divide the work."""
    parallel = given or Parallel(ranks, **config.parallel.model_dump())
    for stage in config.stages:
        if stage.batch_size % parallel.replicas:
            raise UserError(
                f"data.batch_size={stage.batch_size} cannot be divided over {parallel.replicas} data-"
                f"parallel ranks; give a multiple of {parallel.replicas}, or other ranks"
            )
        if stage.seq_len is not None and stage.seq_len % parallel.cp:
            raise UserError(f"data.seq_len={stage.seq_len} cannot be divided over parallel.cp={parallel.cp}")
    if config.training.cuda_graph:
        raise UserError("training.cuda_graph captures no collectives; leave it out with several ranks")
    if config.training.autocast == "float16":
        raise UserError("training.autocast=float16 scales gradients of one process; use bfloat16")
    for use in config.fixes:
        if use.fix in ("optimizer_in_backward", "gradient_accumulation_fusion", "optimizer_8bit", "fsdp2"):
            raise UserError(f"fix {use.fix!r} is for one process; leave it out with several ranks")
        if use.fix in ("optimizer_cpu_offload", "stochastic_rounding") and parallel.data == "fsdp2":
            raise UserError(f"fix {use.fix!r} is for one process; parallel.cpu_offload=true offloads shards")
    return parallel


@contextmanager
def join_ranks(
    config: TrainConfig | None, device: torch.device | None, error: UserError | None
) -> Iterator[Ranks]:
    """This process as a rank of the run, once all ranks agree on what they run.

    `error`: this rank's own reason not to. The first rank raises the first error of all; the others end.
    """
    size, rank = world_size(), int(os.environ.get("RANK", 0))
    kind = "cpu" if device is None else device.type
    if error is None and kind == "cuda" and not dist.is_nccl_available():
        error = UserError("torch was built without NCCL, which several GPUs need; give training.device=cpu")
    store = _rendezvous(rank, size)
    _check_same_run(store, rank, size, _run_description(config, kind, error), error)
    assert config is not None
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore("run", store), rank=rank, world_size=size)
    try:
        with _one_report(store, rank), _lost_ranks(rank):
            yield Ranks(rank, parallel_of(config, size))
    finally:
        dist.destroy_process_group()


@contextmanager
def _lost_ranks(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as failure:
        if not _is_lost_connection(failure):
            raise
        raise LostRank(
            f"rank {rank} lost another rank, which has ended or cannot be reached; continue with --resume, "
            "or start with torchrun --max-restarts=N"
        ) from failure


@contextmanager
def _one_report(store: Any, rank: int) -> Iterator[None]:
    """What fails on all ranks is reported by the first; what fails on another alone, by that one."""
    try:
        yield
    except OomphError as error:
        if rank == 0:
            store.set("failed", "")
            raise
        try:
            store.wait(["failed"], timedelta(seconds=3))
        except RuntimeError:  # it has not, or it has ended and the store with it
            if isinstance(error, LostRank):
                raise OtherRankFailed(int(error.exit_status)) from error
            raise UserError(f"rank {rank}: {error}") from error
        raise OtherRankFailed(int(error.exit_status)) from error


def _rendezvous(rank: int, size: int) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT, which the first rank (or torchrun) opens."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=START_TIMEOUT))
    except (ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0][:200]
        in_use = "EADDRINUSE" in str(error) or "already in use" in str(error)
        why = "the port is in use; give torchrun another --master-port" if in_use else line
        if "clients joined" in line:
            why = f"not all of {size} ranks started within {START_TIMEOUT.total_seconds():.0f} s"
        raise UserError(f"rank {rank} cannot open or reach {where}: {why}") from None
    store.set_timeout(START_TIMEOUT)
    return dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _run_description(config: TrainConfig | None, device: str, error: UserError | None) -> dict[str, Any]:
    if error is not None or config is None:
        return {"error": str(error), "status": int(error.exit_status) if error is not None else 2}
    values = config.to_dict()
    del values["output"], values["training"]["device"]  # may differ between the machines of a run
    return {"oomph": __version__, "torch": str(torch.__version__), "device": device, "config": values}


def _check_same_run(store: Any, rank: int, size: int, own: dict[str, Any], error: UserError | None) -> None:
    """Raise on the first rank, and end the others, if one has an error, another config or other versions."""
    store.set(f"description {rank}", json.dumps(own))
    problem, status = "", ExitStatus.USER_ERROR
    first: dict[str, Any] = {}
    for other in range(size):
        try:
            found = json.loads(store.get(f"description {other}"))
        except RuntimeError:  # or the first rank has ended, and the store with it
            problem = f"rank {other} did not start within {START_TIMEOUT.total_seconds():.0f} s"
            break
        first = first or found
        if found.get("error"):
            problem = found["error"] if other == 0 else f"rank {other}: {found['error']}"
            status = ExitStatus(found["status"])
            break
        if different := _first_difference(found, first):
            problem = f"rank {other} has {different}; start all ranks with the same"
            break
    if problem and rank == 0:
        raise error or UserError(problem)
    if problem:
        raise OtherRankFailed(int(status))


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for key in one:
        if isinstance(one[key], dict):
            if found := _first_difference(one[key], other[key]):
                return f"{key}.{found}".removeprefix("config.")
        elif one[key] != other[key]:
            return f"{key}={one[key]}, and rank 0 {key}={other[key]}"
    return ""


def _is_lost_connection(error: RuntimeError) -> bool:
    text = str(error)
    signs = ("Connection closed", "Connection reset", "Broken pipe", "Socket closed", "imed out")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
